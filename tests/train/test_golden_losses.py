"""Short runs have the stored losses, gradient norms and validation losses, on every CPU."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.contenders import REPO
from benchmarks.golden.cases import CASES, Case
from benchmarks.golden.compare import compare
from benchmarks.golden.inputs import make_inputs
from benchmarks.golden.runs import Run, train_cases
from benchmarks.golden.stored import TOLERANCE, Stored

PORTABLE = [case for case in map(Case.parse, CASES) if case.is_portable()]
ALONE = [case for case in PORTABLE if case.ranks == 1]
QUICK = [
    Case.parse(name)
    for name in (
        "2-replicate-preference-llama-lora",
        "2-shard-text-llama-resume",
        "2-tensor2-text-llama",
        "2-pipeline2-chat-llama-gpipe-resume",
    )
]
"""On two ranks, a case of each strategy that needs no DeepSpeed."""
REST = {
    f"{ranks} ranks{', DeepSpeed' if is_zero3 else ''}": list(group)
    for (ranks, is_zero3), group in itertools.groupby(
        [case for case in PORTABLE if case not in (*ALONE, *QUICK)],
        key=lambda case: (case.ranks, case.is_zero3()),
    )
}


@pytest.fixture(scope="module")
def stored() -> Stored:
    """The stored values."""
    return Stored.read()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, stored: Stored) -> Path:
    """Models and data folders, which have to be those of the stored values."""
    folder = tmp_path_factory.mktemp("golden") / "inputs"
    hashes = make_inputs(folder, (name for case in PORTABLE for name in case.inputs()))
    stored.require(PORTABLE, inputs=hashes)
    return folder


def train(cases: Sequence[Case], *, inputs: Path, folder: Path) -> dict[str, Run]:
    """Train the cases with this tree's code."""
    return train_cases(cases, code=REPO, inputs=inputs, root=folder / "golden", label="test")


def differing(cases: Sequence[Case], found: Mapping[str, Run], stored: Stored) -> list[object]:
    """Return the comparisons with the stored values that do not hold."""
    rows = [compare(case.name, found[case.name], stored.runs[case.name]) for case in cases]
    return [row for row in rows if not row.holds(TOLERANCE)]


@pytest.mark.processes
def test_one_rank_has_the_stored_losses_and_no_others(
    tmp_path: Path, inputs: Path, stored: Stored
) -> None:
    changed = replace(ALONE[0], name="changed", changed=("optimizer.lr=2.02e-3",))
    found = train([*ALONE, changed], inputs=inputs, folder=tmp_path)
    assert differing(ALONE, found, stored) == []
    row = compare("changed", found["changed"], stored.runs[ALONE[0].name])
    assert not row.holds(TOLERANCE) and row.largest["val_loss"] > TOLERANCE


@pytest.mark.ranks
def test_two_ranks_have_the_stored_losses(tmp_path: Path, inputs: Path, stored: Stored) -> None:
    found = train(QUICK, inputs=inputs, folder=tmp_path)
    assert differing(QUICK, found, stored) == []


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("group", REST)
def test_every_other_mesh_has_the_stored_losses(
    tmp_path: Path, inputs: Path, stored: Stored, group: str
) -> None:
    found = train(REST[group], inputs=inputs, folder=tmp_path)
    assert differing(REST[group], found, stored) == []
