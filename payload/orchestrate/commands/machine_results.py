"""Collects results from a cluster's machines before `up` removes some of the machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from payload.orchestrate.clouds.gcp.machine_hand_additions import Additions, added_lines
from payload.orchestrate.clouds.pulumi.engine import Pulumi
from payload.orchestrate.clouds.pulumi.stack_outputs import outputs_if_any
from payload.orchestrate.commands.results_at_stake import ResultsAtRisk, results_at_risk
from payload.orchestrate.terminal.console import confirm

MESSAGES = {"kept": "nothing was built", "force": "up --without-collect"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineResults:
    """Results on the machines of a cluster before `up` removes some of the machines."""

    pulumi: Pulumi
    runs_dir: Path
    without_collect: bool
    """True to accept the loss of the results."""
    assume_yes: bool
    env: Mapping[str, str]
    added: Sequence[Additions]
    """Manual changes to the machines."""
    talk: Console

    def report(self, going: Sequence[str]) -> ResultsAtRisk | None:
        """Print the machines to delete and the runs to collect; return the results at risk.

        Returns None if the machines have no results that could be lost.
        """
        if not going:
            return None
        self.talk.print(
            f"this deletes {len(going)} machine(s) with all their data: {', '.join(going)}"
        )
        outputs = outputs_if_any(self.pulumi)
        if outputs is None or self.without_collect:
            return None
        stake = results_at_risk(
            outputs.inventory.cluster,
            outputs,
            self.env,
            folder=Path.cwd(),
            runs_dir=self.runs_dir,
            talk=self.talk,
        )
        self.talk.print(f"to collect first: {stake.names()}")
        return stake

    def save(self, going: Sequence[str], kept: str, question: str) -> bool:
        """Collect results; return False if the user declines. Raises if results can be lost."""
        for line in added_lines([each for each in self.added if each.machine in going], going):
            self.talk.print(line)
        stake = self.report(going)
        if not going or self.without_collect:
            return True
        if stake is not None:
            stake.refuse_losses(kept=kept, force=MESSAGES["force"])
        if not confirm(question, assume_yes=self.assume_yes):
            return False
        if stake is not None:
            stake.collect_missing(self.env, kept=kept, force=MESSAGES["force"])
        return True
