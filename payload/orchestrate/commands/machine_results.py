"""Results on the machines of a cluster that is up, before `up` removes some of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from payload.orchestrate.clouds.gcp.hand_additions import Additions, added_lines
from payload.orchestrate.clouds.pulumi.engine import Pulumi
from payload.orchestrate.clouds.pulumi.stack_outputs import outputs_if_any
from payload.orchestrate.commands.results_at_stake import AtStake, at_stake
from payload.orchestrate.terminal.console import confirm

WORDS = {"kept": "nothing was built", "force": "up --without-collect"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineResults:
    """Results on the machines of a cluster that is up, before some of them are removed."""

    pulumi: Pulumi
    runs_dir: Path
    without_collect: bool
    """Lose them."""
    assume_yes: bool
    env: Mapping[str, str]
    added: Sequence[Additions]
    """Additions that people have made to the machines by hand."""
    talk: Console

    def look(self, going: Sequence[str]) -> AtStake | None:
        """Say which machines go, and what is to be collected first; None where nothing is."""
        if not going:
            return None
        self.talk.print(
            f"this ends {len(going)} machine(s), with all that is on them: {', '.join(going)}"
        )
        outputs = outputs_if_any(self.pulumi)
        if outputs is None or self.without_collect:
            return None
        stake = at_stake(
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
        """Look, ask, and collect; False after a no. Raises when something would be lost."""
        for line in added_lines([each for each in self.added if each.machine in going], going):
            self.talk.print(line)
        stake = self.look(going)
        if not going or self.without_collect:
            return True
        if stake is not None:
            stake.refuse_losses(kept=kept, force=WORDS["force"])
        if not confirm(question, assume_yes=self.assume_yes):
            return False
        if stake is not None:
            stake.bring_home(self.env, kept=kept, force=WORDS["force"])
        return True
