"""Our runs of a model and the peer's: the verdict, and the section of the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.gpu.speed_cases import SpeedCase
from benchmarks.harness import markdown_table
from payload.core.one_line import shortened
from payload.core.printable_text import counted
from payload.run_record.profile_table import Operator

_SHOWN, _NAME_CHARS = 5, 100
_SPEEDS = (
    "| Program | tokens/s | ms a step | MFU | peak allocated, GiB | peak reserved, GiB |\n"
    "|---|--:|--:|--:|--:|--:|"
)
_KERNELS = "| Longest {kind} of {program} | calls | ms | share of a step |\n|---|--:|--:|--:|"


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """The speed and the peak memory of one program."""

    program: str
    tokens_per_s: float
    step_s: float
    mfu: float | None
    """Share of the peak that our run measured; None above 1, because the peak was then
    disturbed."""
    allocated_bytes: int
    reserved_bytes: int | None
    """None in a rehearsal, where `allocated_bytes` is the peak resident set."""
    kernels: Sequence[Operator] = ()
    """Kernels of a step, the longest first; operators in a rehearsal. Empty for a peer."""

    def cells(self) -> list[str]:
        """Return the cells of this program's row."""
        reserved = "" if self.reserved_bytes is None else _gib(self.reserved_bytes)
        return [
            self.program,
            f"{self.tokens_per_s:,.0f}",
            f"{1000 * self.step_s:,.1f}",
            _share(self.mfu),
            _gib(self.allocated_bytes),
            reserved,
        ]

    def longest_kernels(self, *, kind: str) -> str:
        """Return a table of the longest kernels; `kind` is their name in the head."""
        rows = [
            [
                f"`{shortened(each.name, _NAME_CHARS)}`",
                f"{each.calls:,}",
                f"{1000 * each.self_s:,.2f}",
                f"{each.self_s / self.step_s:.0%}",
            ]
            for each in self.kernels[:_SHOWN]
        ]
        return markdown_table(_KERNELS.format(kind=kind, program=self.program), rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The measurements of a case on one device."""

    case: SpeedCase
    """The case as it ran: small in a rehearsal."""
    peak_flops_per_s: float
    """GEMM peak that our run measured, for every MFU."""
    ours: Sequence[Speed]
    """Our run, and the run with `engine.compile` if there is one."""
    peer: Speed | None
    """None if no peer ran."""
    notes: Sequence[str]
    """Sentences about programs that did not run."""

    def best(self) -> Speed:
        """Return the faster of our runs."""
        return max(self.ours, key=lambda each: each.tokens_per_s)

    def reaches_goals(self) -> bool:
        """Return whether our faster run reaches the ratio and the MFU in at most the peer's
        memory."""
        best, case = self.best(), self.case
        return (
            self.peer is not None
            and best.mfu is not None
            and best.tokens_per_s >= case.least_ratio * self.peer.tokens_per_s
            and best.mfu >= case.least_mfu
            and best.allocated_bytes <= self.peer.allocated_bytes
        )

    def summary(self) -> str:
        """Return ratios and MFU in one line."""
        best, peer = self.best(), self.peer
        if peer is None:
            return f"no peer ran; {best.program}: {best.tokens_per_s:,.0f} tokens/s"
        return (
            f"{best.program}: {best.tokens_per_s / peer.tokens_per_s:.2f} times the tokens/s of "
            f"{peer.program}, MFU {_share(best.mfu)} (peer {_share(peer.mfu)}), "
            f"{best.allocated_bytes / peer.allocated_bytes:.2f} times its memory"
        )

    def section(self, *, rehearsal: bool) -> str:
        """Return the tables and notes; below the goals and in a rehearsal with the longest
        kernels."""
        parts = [markdown_table(_SPEEDS, [each.cells() for each in self._programs()])]
        notes = [self._conditions(), *self.notes]
        if rehearsal:
            notes.append("Memory is the peak resident set of the process.")
        parts.append("\n".join(f"- {note}" for note in notes))
        if rehearsal or not self.reaches_goals():
            kind = "operators" if rehearsal else "kernels"
            parts.append(self.best().longest_kernels(kind=kind))
        return "\n\n".join(parts)

    def numbers(self) -> dict[str, Any]:
        """Return the measurements for the JSON."""
        programs = [asdict(each) for each in self._programs()]
        return {"peak_flops_per_s": self.peak_flops_per_s, "programs": programs}

    def _programs(self) -> list[Speed]:
        return [*self.ours, *([self.peer] if self.peer else [])]

    def _conditions(self) -> str:
        case = self.case
        return (
            f"A step is one micro-batch of {counted(case.micro_batch_size, 'sequence')} of "
            f"{case.sequence_length} tokens, in bf16 with SDPA, without activation "
            "checkpointing, for every program. Trained weights are fp32, frozen linears bf16. MFU "
            "is relative to the GEMM peak that our run measured, "
            f"{self.peak_flops_per_s / 1e12:.3g} TFLOP/s."
        )


def _share(mfu: float | None) -> str:
    return "unknown" if mfu is None else f"{mfu:.1%}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f}"
