"""Short runs have the stored losses, gradient norms and validation losses, on every CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.golden.cases import CASES, Case
from benchmarks.golden.compare import Comparison, compare
from benchmarks.golden.inputs import make_inputs
from benchmarks.golden.runs import Run, train_cases
from benchmarks.golden.stored import TOLERANCE, Stored
from benchmarks.harness import REPO

PORTABLE = [case for case in map(Case.parse, CASES) if case.is_portable()]
ALONE = [
    Case.parse(name)
    for name in (
        "1-replicate-text-gpt2",
        "1-replicate-classify-gpt2-balanced",
        "1-replicate-preference-llama",
    )
]
"""A case of each task except conversations, which are in `PAIRS`."""
PAIRS = [
    Case.parse(name)
    for name in (
        "2-replicate-text-gpt2",
        "2-shard-preference-gpt2",
        "2-tensor2-text-llama",
        "2-pipeline2-chat-llama-gpipe-resume",
    )
]
"""A case of each strategy that needs no DeepSpeed."""
OTHERS = [case for case in PORTABLE if case not in ALONE and case not in PAIRS]
GROUPS = ("1 rank", "2 ranks")
LONG_GROUPS = ("2 ranks with DeepSpeed", "4 ranks")


@pytest.fixture(scope="module")
def stored() -> Stored:
    """The stored values."""
    return Stored.read()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, stored: Stored) -> Path:
    """Return models and data folders that match the stored values."""
    return inputs_of([*ALONE, *PAIRS], tmp_path_factory.mktemp("golden") / "inputs", stored)


@pytest.fixture(scope="module")
def all_inputs(tmp_path_factory: pytest.TempPathFactory, stored: Stored) -> Path:
    """The same for every case."""
    return inputs_of(PORTABLE, tmp_path_factory.mktemp("golden") / "inputs", stored)


def inputs_of(cases: Sequence[Case], folder: Path, stored: Stored) -> Path:
    """Make the inputs of these cases in a folder."""
    hashes = make_inputs(folder, (name for case in cases for name in case.inputs()))
    stored.require(cases, inputs=hashes)
    return folder


def group_of(case: Case) -> str:
    """Return the name of the cases that share a start of their ranks."""
    ranks = f"{case.ranks} rank{'s' if case.ranks > 1 else ''}"
    return f"{ranks} with DeepSpeed" if case.is_zero3() else ranks


def train(cases: Sequence[Case], *, inputs: Path, folder: Path) -> dict[str, Run]:
    """Train the cases with this tree's code."""
    return train_cases(cases, code=REPO, inputs=inputs, root=folder / "golden", label="test")


def differing(cases: Sequence[Case], found: Mapping[str, Run], stored: Stored) -> list[Comparison]:
    """Return the comparisons with the stored values that do not hold."""
    rows = [compare(case.name, found[case.name], stored.runs[case.name]) for case in cases]
    return [row for row in rows if not row.holds(TOLERANCE)]


@pytest.mark.slow
@pytest.mark.processes
def test_one_rank_has_the_stored_losses_and_another_lr_has_others(
    tmp_path: Path, inputs: Path, stored: Stored
) -> None:
    changed = replace(ALONE[0], name="changed", changed=("optimizer.lr=2.02e-3",))
    found = train([*ALONE, changed], inputs=inputs, folder=tmp_path)
    assert differing(ALONE, found, stored) == []
    row = compare("changed", found["changed"], stored.runs[ALONE[0].name])
    assert not row.holds(TOLERANCE) and row.largest["val_loss"] > TOLERANCE


@pytest.mark.slow
@pytest.mark.ranks
def test_two_ranks_have_the_stored_losses(tmp_path: Path, inputs: Path, stored: Stored) -> None:
    found = train(PAIRS, inputs=inputs, folder=tmp_path)
    assert differing(PAIRS, found, stored) == []


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    "group", [*GROUPS, *(pytest.param(each, marks=pytest.mark.seeds) for each in LONG_GROUPS)]
)
def test_every_other_case_has_the_stored_losses(
    tmp_path: Path, all_inputs: Path, stored: Stored, group: str
) -> None:
    cases = [case for case in OTHERS if group_of(case) == group]
    found = train(cases, inputs=all_inputs, folder=tmp_path)
    assert differing(cases, found, stored) == []


def test_every_case_with_stored_values_is_in_a_group() -> None:
    assert {group_of(case) for case in OTHERS} == {*GROUPS, *LONG_GROUPS}
