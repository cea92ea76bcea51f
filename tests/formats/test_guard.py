"""No format of a run, a checkpoint, a data folder or a store changes without a new version.

The current code writes the files: it resumes the fixtures and prepares data. Other tests
compare the formats of clusters (tests/orchestrate/cluster) and of stacks (test_stack.py).
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from payload.core.file_hash import sha256_of
from payload.run_record.run_identity import RunIdentity
from tests.formats.commands import Commands
from tests.formats.filled import filled, filled_samples
from tests.formats.making.inputs import write_texts
from tests.formats.making.recipe import PROMPTS
from tests.formats.recorded import Recorded, read_json, rows
from tests.support.formats import assert_format, assert_keys, names_in, tensors_in

pytestmark = pytest.mark.processes

TASKS = ("text", "chat", "classify", "preference")
VARIABLES = ("launcher_environment", "environment", "interfaces")
"""Objects of a plan with names of variables or nodes as keys."""


IAP = {"kind": "iap", "project": "acme-lab"}
GPU_NODE = {
    **{"external_address": "192.0.2.7", "instance_id": "7", "gpus": 1},
    **{"gpu_memory_gib": 22.5, "gpu_capability": "8.9"},
}
AFTER_FAILURES = {
    **{"error": "str", "failed_rank": "int", "note": "str", "store.problem": "str"},
    "store.failing_since_unix": "float",
}
"""Types that the view of a run has only after failures."""


def sets(*settings: str) -> list[str]:
    """Return settings as command-line arguments."""
    return [word for setting in settings for word in ("--set", setting)]


@pytest.fixture(scope="module")
def full(supervised: Recorded) -> Path:
    """A run that the current code planned, trained on two ranks, profiled and stored."""
    return supervised.run_dir("full")


@dataclass(frozen=True, slots=True)
class Prepared:
    """Data of each task, prepared by the current code, with stored reference log-probabilities."""

    copy: Recorded
    printed: list[Any]
    """Output of `prepare --json` for each task."""
    estimated: Any
    """Output of `prepare --dry-run --json`."""

    def folders(self) -> dict[str, Path]:
        """Return the folder of each task."""
        return {task: self.copy.project / "new" / task for task in TASKS}


@pytest.fixture(scope="module")
def prepared(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """Data folders, and a run over the pairs."""
    copy = Recorded.copied_to(tmp_path_factory.mktemp("prepared") / "ada")
    write_texts(copy.project / "sources")
    printed, estimated = [], None
    for task in TASKS:
        kind, file = ("text", "text.txt") if task == "text" else ("jsonl", f"{task}.jsonl")
        words = ["--task", task, "--source", kind, "--input", f"sources/{file}", "--quiet"]
        words += ["--tokenizer", "./models/base", "--val-fraction", "0.2", "--out", f"new/{task}"]
        if task in ("chat", "preference"):
            words += ["--sequence-length", "64"]
        if task == "chat":
            words += ["--add-special-tokens", "<|new|>"]
        if task == "classify":
            words += ["--text-column", "text", "--label-column", "label", "--dedup", "exact"]
        if task == "text":
            dry_run = commands.do("prepare", *words, "--dry-run", "--json", folder=copy.project)
            estimated = dry_run.last_json()
        printed.append(commands.do("prepare", *words, "--json", folder=copy.project).last_json())
    more = sets("data.dir=new/preference", "model.init=./models/base", "task.kind=preference")
    words = ["--config", "adapter.toml", "--run-dir", "runs/new", *more, *sets("train.steps=3")]
    commands.do("train", *words, folder=copy.project)
    return Prepared(copy, printed, estimated)


@pytest.mark.ranks
def test_the_settings_of_a_run(supervised: Recorded, full: Path) -> None:
    assert supervised.is_new(full / "run.toml")
    text = (full / "run.toml").read_text(encoding="utf-8")
    assert_format("run.toml", [tomllib.loads(text)], refuses_unknown_keys=True)


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["ranks", "state", "summary", "storage"])
def test_a_record_of_a_run(supervised: Recorded, full: Path, name: str) -> None:
    found = supervised.new_json(full / f"{name}.json")
    documents = [found] if name == "ranks" else [found, filled(name)]
    also = {"ranks[].numa_domain": "int | null"} if name == "ranks" else {}
    maps = ("start_s", "val_metrics", "versions") if name == "summary" else ()
    assert_format(name, documents, maps=maps, also=also)


@pytest.mark.ranks
def test_the_identity_of_a_run(supervised: Recorded, full: Path) -> None:
    found = supervised.new_json(full / "identity.json")
    known = RunIdentity(identity="0" * 32, store_token="0" * 32, is_older=True)
    assert_format("identity", [found, json.loads(known.to_json())])
    owner = supervised.new_json(supervised.store / "full" / "owner.json")
    trainer = read_json(supervised.stored_checkpoint("full") / "trainer.json")
    assert {found["identity"]} == {owner["identity"], trainer["identity"]}


@pytest.mark.ranks
def test_the_hashes_that_the_head_has_written(supervised: Recorded, full: Path) -> None:
    found = supervised.new_json(full / "manifest_hashes.json")
    assert_format("manifest_hashes", [found])
    stored = supervised.stored_checkpoint("full")
    assert {each["checkpoint"]: each["sha256"] for each in found["hashes"]}[stored.name] == (
        sha256_of(stored / "manifest.json")
    )


@pytest.mark.ranks
def test_the_records_of_ranks(supervised: Recorded, full: Path) -> None:
    for name, folder in (("heartbeat", "progress"), ("exit", "exits")):
        found = [supervised.new_json(path) for path in sorted((full / folder).glob("*.json"))]
        assert len(found) == 2
        assert_format(name, [*found, filled(name)])


@pytest.mark.ranks
def test_the_profile_of_a_step(supervised: Recorded, full: Path) -> None:
    found = supervised.new_json(full / "profile" / "operators.json")
    assert_format("operators", [found])


def test_records_that_no_command_here_leaves(tmp_path: Path) -> None:
    """A request to stop, the record of a Slurm job, and a script's samples."""
    assert_format("stop", [filled("stop")])
    assert_format("job", [filled("job")])
    assert_format("samples", [filled_samples(tmp_path)])


@pytest.mark.ranks
def test_the_rows_of_metrics(supervised: Recorded, continued: Recorded) -> None:
    assert_rows("metrics", supervised.run_dir("full"), after=8)
    assert_rows("metrics.classify", continued.run_dir("labels"), after=6)
    assert_rows("metrics.preference", continued.run_dir("pairs"), after=6)


def assert_rows(name: str, run_dir: Path, *, after: int) -> None:
    """Compare the rows of later steps, which the current code wrote."""
    new = [row for row in rows(run_dir) if row["step"] > after]
    steps = [row for row in new if "loss" in row]
    assert_format(f"{name}.step", steps, also={"mfu": "float | null"})
    assert_format(f"{name}.evaluation", [row for row in new if "val_loss" in row])


@pytest.fixture(scope="module")
def checkpoints(supervised: Recorded, continued: Recorded) -> dict[str, Path]:
    """A checkpoint with all weights, one with an adapter and one with a classifier's adapter."""
    found = {
        "all weights": supervised.stored_checkpoint("full"),
        "adapter": continued.stored_checkpoint("pairs"),
        "classifier": continued.stored_checkpoint("labels"),
    }
    for kind, folder in found.items():
        copy = supervised if kind == "all weights" else continued
        assert copy.is_new(folder / "manifest.json")
    return found


def documents(folders: dict[str, Path], name: str) -> list[Any]:
    """Return the documents with this name in all folders."""
    return [json.loads((folder / name).read_text("utf-8")) for folder in folders.values()]


@pytest.mark.ranks
def test_the_records_of_a_checkpoint(checkpoints: dict[str, Path]) -> None:
    assert_format("manifest", documents(checkpoints, "manifest.json"), maps=("files",))
    maps = ("data_sha256", "tokenizer", "versions")
    also = {"base.config_sha256": "null"}
    assert_format("trainer", documents(checkpoints, "trainer.json"), maps=maps, also=also)


@pytest.mark.ranks
def test_the_configs_in_a_checkpoint_for_other_libraries(checkpoints: dict[str, Path]) -> None:
    """transformers and PEFT read these files."""
    own = {name: checkpoints[name] for name in ("adapter", "classifier")}
    assert_format("adapter_config", documents(own, "adapter_config.json"))
    full = {"all weights": checkpoints["all weights"]}
    assert_format("config.gpt2", documents(full, "config.json"))


@pytest.mark.ranks
def test_the_tensors_of_a_checkpoint(checkpoints: dict[str, Path]) -> None:
    whole, adapter = checkpoints["all weights"], checkpoints["classifier"]
    for name, path in {
        "model.gpt2": whole / "model.safetensors",
        "optimizer.adamw.gpt2": whole / "optimizer.safetensors",
        "adapter_model": adapter / "adapter_model.safetensors",
        "optimizer.adamw.lora": adapter / "optimizer.safetensors",
    }.items():
        assert_keys(name, tensors_in(path), version=1, refuses_unknown_keys=True)


@pytest.mark.ranks
def test_the_names_of_files(supervised: Recorded, full: Path, checkpoints: dict[str, Path]) -> None:
    assert_keys("names.run", names_in(full, is_new=supervised.is_new), version=None)
    assert_keys("names.store", names_in(supervised.store / "full"), version=None)
    for kind in ("adapter", "classifier"):
        assert_keys(f"names.checkpoint.{kind}", names_in(checkpoints[kind]), version=1)


@pytest.mark.ranks
def test_the_owner_of_a_run_in_a_store(supervised: Recorded) -> None:
    found = supervised.new_json(supervised.store / "full" / "owner.json")
    assert_format("owner", [found])


def test_the_folders_of_data(prepared: Prepared) -> None:
    folders, maps = prepared.folders(), ("files", "tokenizer_files")
    also = {"revision": "str", "selection.dedup": "null"}
    assert_format("meta", documents(folders, "meta.json"), maps=maps, also=also)
    for task, folder in folders.items():
        assert_keys(f"names.data.{task}", names_in(folder), version=1)
    found = prepared.copy.new_json(folders["preference"] / "reference.json")
    assert_format("reference", [found], maps=("files",), also={"model.revision": "str"})


def test_what_prepare_prints(prepared: Prepared) -> None:
    maps = ("files", "tokenizer_files")
    also = {"revision": "str", "selection.dedup": "null"}
    assert_format("output.prepare", prepared.printed, maps=maps, also=also)
    assert_format("output.estimate", [prepared.estimated])


@pytest.mark.ranks
def test_a_plan_and_an_inventory(
    commands: Commands, supervised: Recorded, full: Path, recorded: Recorded
) -> None:
    """An inventory of this machine, and one of a cluster whose nodes have all keys."""
    every = read_json(recorded.project / "rack.json")
    every |= {"project": "acme-lab", "bucket": "results", "access": IAP}
    every["nodes"] = [node | GPU_NODE for node in every["nodes"]]
    (recorded.project / "every.json").write_text(json.dumps(every), encoding="utf-8")
    words = ("plan", "text.toml", "--inventory", "every.json", "--json")
    more = sets("batch.micro_batch_size=auto", "device.kind=cpu")
    planned = json.loads(commands.do(*words, *more, folder=recorded.project).out)
    plans = [supervised.new_json(full / "plan.json"), planned["plan"]]
    also = {
        "arithmetic.compute_s": "float",
        "arithmetic.mfu": "float",
        "arithmetic.step_s": "float",
    }
    assert_format("plan", plans, maps=VARIABLES, also=also)
    inventories = [supervised.new_json(full / "inventory.json"), planned["inventory"]]
    assert_format("inventory", inventories, refuses_unknown_keys=True)
    maps = [f"plan.{name}" for name in VARIABLES]
    assert_format("output.plan", [planned], maps=maps)
    compared = json.loads(commands.do(*words, "--strategies", folder=recorded.project).out)
    assert_format("output.strategies", [compared])


@pytest.mark.ranks
def test_what_commands_print_of_runs(commands: Commands, supervised: Recorded) -> None:
    listed = json.loads(commands.do("list", "--json", folder=supervised.project).out)
    shown = commands.do("status", "full", "--json", folder=supervised.project).out
    assert_format("output.list", listed, maps=("val_metrics",), also=AFTER_FAILURES)
    assert_format("output.status", [json.loads(shown)], maps=("val_metrics",), also=AFTER_FAILURES)


def test_what_commands_print_of_models(
    commands: Commands, recorded: Recorded, continued: Recorded
) -> None:
    def printed(*words: str, folder: Path = recorded.project) -> Any:
        return commands.do(*words, "--json", folder=folder).last_json()

    for task, run in (("text", "full"), ("classify", "labels")):
        words = ("--checkpoint", f"runs/{run}", "--data", f"data/{task}")
        assert_format(f"output.evaluate.{task}", [printed("evaluate", *words)])
    words = ("--checkpoint", "runs/pairs", "--data", "data/preference")
    found = printed("evaluate", *words, folder=continued.project)
    assert_format("output.evaluate.preference", [found])
    prompt = ("--checkpoint", "runs/full", "--prompt", PROMPTS["full"])
    assert_format("output.generate", [printed("generate", *prompt, "--max-new-tokens", "2")])
    prompt = ("--checkpoint", "runs/labels", "--prompt", PROMPTS["labels"])
    found = printed("generate", "--classify", *prompt)
    assert_format("output.classify", [found], maps=("scores",))
