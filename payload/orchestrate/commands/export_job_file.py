"""`plan --export`: write a run as a job file for another engine."""

from __future__ import annotations

from payload.core.errors import ExitCode, UsageError
from payload.core.files import write_whole
from payload.core.suggested_commands import quoted
from payload.launch.exports.registry import ENGINES
from payload.orchestrate.commands.config_choice import load_config
from payload.orchestrate.commands.run_commands_options import PlanOptions
from payload.orchestrate.inventories.chosen import load_cluster
from payload.orchestrate.machine_profiles.local_profile import LocalAccess
from payload.orchestrate.runs.export_plan import plan_export
from payload.orchestrate.terminal.console import text_console
from payload.orchestrate.terminal.narrow import print_message

_EXPORT_ONLY = ("out", "image", "storage")


def require_no_export_options(options: PlanOptions) -> None:
    """Raise UsageError if an option of `--export` is given without `--export`."""
    for name in _EXPORT_ONLY:
        if getattr(options, name) is not None:
            raise UsageError(f"--{name} needs --export ENGINE.")


def export(options: PlanOptions, access: LocalAccess, *, engine_name: str) -> int:
    """Write or print the job file, and print the command that starts it."""
    talk, engine = text_console(stderr=True), ENGINES[engine_name]
    chosen = load_cluster(options.inventory, env=access.environment())
    print_message(talk, chosen.headline())
    config = load_config(options)
    nodes = options.nodes
    if nodes is None and engine_name == "sbatch" and config.slurm.nodes > 1:
        nodes = config.slurm.nodes
    job, notes = plan_export(
        config,
        run_id=options.run_id,
        machines=chosen.inventory.nodes,
        domains=chosen.domains,
        nodes=nodes,
        image=options.image,
        storage=options.storage,
    )
    engine.require(job)
    for note in notes:
        print_message(talk, f"note: {note}")
    text, where = engine.render(job), "FILE"
    if options.out is None:
        text_console(stderr=False).print(text.removesuffix("\n"))
    else:
        where = quoted(str(options.out))
        try:
            write_whole(options.out, text)
        except OSError as error:
            raise UsageError(
                f"--out {options.out}: {error.strerror}. Choose a file that can be written."
            ) from None
    talk.print(
        f"run {job.run_id}: {job.nodes} node(s) x {job.ranks_per_node} rank(s) x "
        f"{job.threads_per_rank} thread(s). Start it with: {engine.start.replace('FILE', where)}"
    )
    return ExitCode.OK
