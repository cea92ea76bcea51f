"""Adds a trial to preflight's report, and decides when `run` needs one."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from payload.inventory import ClusterInventory
from payload.orchestrate.cluster import Cluster
from payload.orchestrate.code import this_code
from payload.orchestrate.console import text_console
from payload.orchestrate.findings import TRIED
from payload.orchestrate.initial import initial_spec
from payload.orchestrate.inventories import Chosen
from payload.orchestrate.local import LocalAccess
from payload.orchestrate.measured import Record, known_trial, nodes_sha, record_path
from payload.orchestrate.preflight_report import Report
from payload.orchestrate.speed_findings import exchange_findings, predict, speed_findings, summary
from payload.orchestrate.trial import Trial, try_cluster, try_this_machine
from payload.run_config import RunConfig

FRESH_S = 24 * 3600.0
"""How long `run` trusts a trial of the same payload on the same nodes."""


def try_there(report: Report, chosen: Chosen, cluster: Cluster, config: RunConfig) -> Report:
    """The report on a cluster with a trial, which is kept if it went well."""
    talk = text_console(stderr=True)
    report = with_trial(
        report,
        chosen.inventory,
        config,
        lambda: try_cluster(chosen, cluster, report.facts, config=config, talk=talk),
    )
    keep(report, chosen.inventory, Path.cwd(), now_unix=time.time())
    return report


def try_if_new(report: Report, chosen: Chosen, cluster: Cluster, config: RunConfig) -> Report:
    """The same before a run, which trusts a trial of this payload on these nodes for a day."""
    record = known_trial(chosen.inventory, Path.cwd())
    if record is not None and is_fresh(record, now_unix=time.time()):
        return replace(report, measured=record.measured)
    return try_there(report, chosen, cluster, config)


def try_here(report: Report, chosen: Chosen, access: LocalAccess, config: RunConfig) -> Report:
    """The report on this machine with a trial."""
    with tempfile.TemporaryDirectory(prefix="tileforge-") as folder:
        return with_trial(
            report,
            chosen.inventory,
            config,
            lambda: try_this_machine(chosen, access, Path(folder)),
        )


def with_trial(
    report: Report, inventory: ClusterInventory, config: RunConfig, make: Callable[[], Trial]
) -> Report:
    """The report with what the trial found; none is made on nodes that are not fit for one."""
    if report.exit_code:
        note = f"nothing was started or measured, as {', '.join(report.failing_nodes())} is not fit"
        return replace(report, notes=[*report.notes, note])
    mute = [name for name, facts in report.facts.items() if not facts.resolver_answers]
    if mute:
        # Each rank and mpirun itself would wait for it many times.
        note = f"mpirun was not tried, as the resolver of {', '.join(mute)} does not answer"
        return replace(report, notes=[*report.notes, note])
    began = time.monotonic()
    trial = make()
    took_s = report.took_s + time.monotonic() - began
    if trial.note is not None:
        return replace(report, notes=[*report.notes, trial.note], took_s=took_s)
    tried = (trial.launcher, *TRIED)
    made = [check for check in tried if check != "gloo" or len(inventory.nodes) > 1]
    findings, notes = list(trial.findings), list(report.notes)
    if trial.measured is None:
        # What comes after the one that failed was not tried.
        made = sorted({finding.check for finding in findings} & set(made), key=tried.index)
    else:
        spec, guess = initial_spec(config, vocab_size=None)
        prediction = predict(config, config.adapted(spec), trial.measured)
        findings += speed_findings(inventory.nodes, trial.measured)
        findings += exchange_findings(inventory.nodes, trial.measured, prediction)
        notes += [summary(trial.measured, prediction), *([guess] if guess else [])]
    return replace(
        report,
        checks={node: [*checks, *made] for node, checks in report.checks.items()},
        findings=[*report.findings, *findings],
        measured=trial.measured,
        notes=notes,
        took_s=took_s,
    )


def keep(report: Report, inventory: ClusterInventory, root: Path, *, now_unix: float) -> None:
    """Write down a trial that went well, for `plan` and the next `run`."""
    if report.measured is None or report.exit_code:
        return
    interfaces = {name: facts.interface for name, facts in report.facts.items()}
    Record(
        nodes_sha=nodes_sha(inventory),
        code=this_code().digest,
        time_unix=now_unix,
        interfaces={name: found for name, found in interfaces.items() if found},
        measured=report.measured,
    ).write(record_path(root, cluster=inventory.cluster))


def is_fresh(record: Record, *, now_unix: float) -> bool:
    """Whether `run` may go without another trial."""
    age_s = now_unix - record.time_unix
    return record.code == this_code().digest and 0 <= age_s < FRESH_S
