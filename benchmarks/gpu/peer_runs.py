"""Runs the first available peer: TRL's SFTTrainer, transformers' Trainer, or a plain FSDP2 loop."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.facts import missing_packages
from benchmarks.gpu.programs import ProgramError, Programs
from benchmarks.peers.work import Work


class NoPeerError(Exception):
    """No peer ran; the message has a sentence for each peer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Another project's training program."""

    name: str
    module: str
    packages: tuple[str, ...]
    """Packages that it needs; the first one names its version on the page."""

    def missing(self, *, has_adapter: bool) -> list[str]:
        """Return the needed packages that are not installed."""
        return missing_packages([*self.packages, *(["peft"] if has_adapter else [])])


PEERS = (
    Peer(
        name="TRL's SFTTrainer",
        module="benchmarks.peers.train_trl",
        packages=("trl", "datasets", "transformers"),
    ),
    Peer(
        name="transformers' Trainer",
        module="benchmarks.peers.train_trainer",
        packages=("transformers", "accelerate"),
    ),
    Peer(
        name="FSDP2 loop",
        module="benchmarks.peers.train_fsdp2",
        packages=("transformers",),
    ),
)
"""The peers; a stage takes the first one that runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRun:
    """The report of the peer that ran."""

    name: str
    """Name with the version."""
    report: dict[str, Any]
    reasons: tuple[str, ...]
    """Sentences with the reasons why the peers before it did not run."""


def run_peer(
    programs: Programs, work: Work, *, name: str, limit_s: float, peers: Sequence[Peer] = PEERS
) -> PeerRun:
    """Run the first peer whose packages are installed and whose program succeeds.

    Raises NoPeerError if none succeeds.
    """
    reasons: list[str] = []
    for peer in peers:
        if missing := peer.missing(has_adapter=work.adapter is not None):
            reasons.append(f"{peer.name} did not run: not installed: {', '.join(missing)}.")
            continue
        try:
            programs.run(name, peer.module, work.to_json(), limit_s=limit_s)
        except ProgramError as error:
            reasons.append(f"{peer.name} failed: {error}.")
            continue
        report = json.loads(Path(work.report).read_text(encoding="utf-8"))
        package = peer.packages[0]
        version = report["versions"][package]
        return PeerRun(
            name=f"{peer.name}, {package} {version}", report=report, reasons=tuple(reasons)
        )
    raise NoPeerError(" ".join(reasons))
