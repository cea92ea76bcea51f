"""Every task learns and reports the same on any number of ranks."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from payload.evaluate.__main__ import main as evaluate
from payload.formats.data_folder import load_meta
from tests.support.accelerate_state import forget_accelerate
from tests.support.chat_data import MARKED_TEMPLATE, PLAIN_TEMPLATE, conversations, make_model
from tests.support.launching import evaluate_several, losses, metrics, train_several
from tests.support.preference_data import pairs
from tests.train.alone import train_alone
from tests.train.task_runs import (
    CLASSIFY,
    LORA,
    WORDS,
    chat_config,
    classify_base,
    classify_data,
    evaluations,
    json_of,
    preference_config,
)

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("one_thread")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run on several ranks; the run on one rank has the same config."""

    config: str
    """The task."""
    ranks: int
    overrides: tuple[str, ...]
    strategy: tuple[str, ...] = ()
    """Overrides for the run on several ranks only."""


_CHAT = ("train.steps=8", "batch.global_batch_size=6", "batch.micro_batch_size=1")
_PAIRS = ("train.steps=6", "batch.micro_batch_size=1", "train.checkpoint_every=0")
_OF_SIX = "batch.global_batch_size=6"
_FAST = ("optimizer.lr=0.01", "optimizer.min_lr=0.01")
_TEXTS = ("task.class_weights=balanced", "train.steps=4", "schedule.warmup_steps=0")
CASES = {
    "chat": Case(config="chat", ranks=3, overrides=_CHAT),
    "preference-lora": Case(
        config="preference", ranks=3, overrides=(*_PAIRS, *LORA, *_FAST, _OF_SIX)
    ),
    "classify": Case(config="classify", ranks=3, overrides=(*CLASSIFY, *_TEXTS)),
}
"""Tasks of `make test`; they share one start of ranks."""
OTHERS = {
    "preference": Case(config="preference", ranks=4, overrides=_PAIRS),
    "preference-shard": Case(
        config="preference", ranks=2, overrides=_PAIRS, strategy=("distributed.strategy=shard",)
    ),
    "classify-lora": Case(config="classify", ranks=2, overrides=(*CLASSIFY, *LORA, *_TEXTS)),
}


@dataclass(frozen=True, slots=True)
class Task:
    """A config, and the overrides that name its data and weights."""

    config: Path
    data: Path
    overrides: tuple[str, ...] = ()


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory, tiny_config: Path) -> Mapping[str, Task]:
    """Return each task's config and data; batches of conversations have unequal trained tokens."""
    chat, preference, texts = (tmp_path_factory.mktemp(name) for name in ("chat", "pairs", "texts"))
    model = make_model(chat / "model", template=MARKED_TEMPLATE)
    rows = [{"messages": each} for turns in (1, 2) for each in conversations(40, turns=turns)]
    other = make_model(preference / "model", template=PLAIN_TEMPLATE)
    base = classify_base(tmp_path_factory.mktemp("base"))
    data = classify_data(texts)
    return {
        "chat": Task(chat_config(chat, model, rows, "--val-fraction", 0.2), chat / "data"),
        "preference": Task(preference_config(preference, other, pairs(60)), preference / "data"),
        "classify": Task(tiny_config, data, (f"data.dir={data}", f"model.init={base}")),
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tasks: Mapping[str, Task]) -> Path:
    """Return a folder with the runs of `CASES`: `NAME/several` and `NAME/one`."""
    return train_all(CASES, tasks, tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory, tasks: Mapping[str, Task]) -> Path:
    """Return the same for `OTHERS`."""
    return train_all(OTHERS, tasks, tmp_path_factory.mktemp("others"))


def train_all(cases: Mapping[str, Case], tasks: Mapping[str, Task], root: Path) -> Path:
    """Train each case on its ranks and on one.

    Each has a separate copy of the data, as a run on pairs stores its reference in it.
    """
    together: dict[int, dict[Path, tuple[str, ...]]] = defaultdict(dict)
    configs: dict[Path, Path] = {}
    for name, case in cases.items():
        task = tasks[case.config]
        for kind, strategy in (("several", case.strategy), ("one", ())):
            folder = root / name / kind
            data = shutil.copytree(task.data, root / name / f"{kind}-data")
            words = (*task.overrides, *case.overrides, *strategy, f"data.dir={data}")
            if kind == "several":
                together[case.ranks][folder] = words
                configs[folder] = task.config
            else:
                forget_accelerate()
                train_alone(folder, task.config, *words)
    for ranks, runs in together.items():
        train_several(runs, configs, num_ranks=ranks)
    return root


@pytest.mark.slow
def test_conversations_have_the_losses_of_one_rank_and_of_other_micro_batches(
    trained: Path, tasks: Mapping[str, Task], tmp_path: Path
) -> None:
    train_alone(tmp_path / "large", tasks["chat"].config, *_CHAT, "batch.micro_batch_size=6")
    found = {}
    for folder in (tmp_path / "large", trained / "chat" / "one", trained / "chat" / "several"):
        last = evaluations(folder)[-1]
        found[folder.name] = (losses(folder), last["val_loss"], last["val_tokens"])
    chat = load_meta(tasks["chat"].data).chat
    assert chat is not None
    for of_run in found.values():
        assert of_run[0] == pytest.approx(found["large"][0], rel=2e-6)
        assert of_run[1] == pytest.approx(found["large"][1], rel=2e-6)
        assert of_run[2] == chat.val_trained_tokens


@pytest.mark.slow
def test_pairs_have_the_losses_rewards_and_reference_of_one_rank(trained: Path) -> None:
    check_pairs(trained / "preference-lora")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["preference", "preference-shard"])
def test_so_have_pairs_on_other_ranks_and_in_shards(name: str, others: Path) -> None:
    check_pairs(others / name)


def check_pairs(case: Path) -> None:
    """Compare the two runs of a case."""
    several, one = (case / kind for kind in ("several", "one"))
    assert evaluations(several)[0] == evaluations(one)[0]
    assert losses(several) == pytest.approx(losses(one), abs=1e-5)
    for key in ("reward_margin", "val_margin", "val_loss"):
        of_runs = [[row[key] for row in metrics(run) if key in row] for run in (several, one)]
        assert of_runs[0] == pytest.approx(of_runs[1], abs=1e-5) and len(of_runs[0]) >= 2
    stored = [
        (case / f"{kind}-data" / "reference.fp32.bin").read_bytes() for kind in ("several", "one")
    ]
    assert stored[0] == stored[1]


def test_a_classifier_has_the_losses_and_confusion_of_one_rank(trained: Path) -> None:
    check_classifier(trained / "classify")


@pytest.mark.slow
def test_so_has_the_adapter_of_a_classifier(others: Path) -> None:
    check_classifier(others / "classify-lora")


def check_classifier(case: Path) -> None:
    """Compare the two runs of a case."""
    several, one = (case / kind for kind in ("several", "one"))
    assert evaluations(several)[0] == evaluations(one)[0]
    assert evaluations(several)[-1]["val_confusion"] == evaluations(one)[-1]["val_confusion"]
    assert losses(several) == pytest.approx(losses(one), rel=1e-5)


@pytest.fixture(scope="module")
def evaluated(
    tmp_path_factory: pytest.TempPathFactory, tasks: Mapping[str, Task]
) -> Mapping[str, Path]:
    """Return runs of one rank to evaluate, on pairs and on texts."""
    root = tmp_path_factory.mktemp("evaluated")
    for name, overrides in (
        ("preference", ("task.beta=0.3", "train.steps=6")),
        ("classify", CLASSIFY),
    ):
        task = tasks[name]
        forget_accelerate()
        train_alone(root / name, task.config, *task.overrides, *overrides)
    return {name: root / name for name in ("preference", "classify")}


def on_ranks(
    tasks: Mapping[str, Task], evaluated: Mapping[str, Path], *, ranks: int, root: Path
) -> Mapping[str, dict[str, Any]]:
    """Return the JSON of `evaluate` by task, on `ranks` ranks."""
    commands = {root / name: words(name, evaluated, tasks) for name in evaluated}
    printed = evaluate_several(commands, num_ranks=ranks)
    return {path.name: json_of(text) for path, text in printed.items()}


def words(name: str, evaluated: Mapping[str, Path], tasks: Mapping[str, Task]) -> list[str]:
    return ["--checkpoint", str(evaluated[name]), "--data", str(tasks[name].data), "--json"]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_evaluate_gives_the_numbers_of_one_rank(
    ranks: int,
    tasks: Mapping[str, Task],
    evaluated: Mapping[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    several = on_ranks(tasks, evaluated, ranks=ranks, root=tmp_path)
    for name in evaluated:
        assert evaluate(words(name, evaluated, tasks), {}) == 0
        row = json_of(capsys.readouterr().out)
        found = [dict(each) for each in (row, several[name])]
        assert [each.pop("world_size") for each in found] == [1, ranks]
        assert found[0] == found[1]
        last = evaluations(evaluated[name])[-1]
        if name == "classify":
            assert row["labels"] == sorted(WORDS) and row["val_texts"] == 31
            continue
        assert row["beta"] == 0.3 and row["val_pairs"] == 12
        for key in ("val_loss", "accuracy", "margin", "chosen_reward", "rejected_reward"):
            assert row[key] == pytest.approx(last["val_" + key.removeprefix("val_")], abs=1e-5)
        assert evaluate(words(name, evaluated, tasks)[:-1], {}) == 0
        assert "of the chosen answers have the higher reward" in capsys.readouterr().out
