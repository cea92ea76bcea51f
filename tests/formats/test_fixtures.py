"""The current code lists, resumes, evaluates, exports and reports files of 9e71e47."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from payload.run_record.approved_settings import unapproved_settings
from payload.run_record.run_files import RunPaths
from tests.formats.commands import Commands
from tests.formats.making.recipe import PROMPTS
from tests.formats.recorded import CLOSE, FIXTURES, Recorded, expected, read_json, rows

pytestmark = pytest.mark.processes

ADAPTERS = ("lora", "labels", "pairs")
RUNS = ("far", "full", "kept", *ADAPTERS)


def close(value: float) -> object:
    """Return an object that equals every similar loss."""
    return pytest.approx(value, rel=CLOSE)


def require_continued(run_dir: Path, name: str) -> None:
    """Fail unless the resumed run has the losses of the uninterrupted run of 9e71e47."""
    known = expected()[name]
    trained = {row["step"]: row["loss"] for row in rows(run_dir) if "loss" in row}
    assert sorted(trained) == list(range(1, known["last_step"] + 1))
    assert {str(step): loss for step, loss in trained.items() if step > known["stored_step"]} == {
        step: close(loss) for step, loss in known["losses"].items()
    }
    evaluated = [row["val_loss"] for row in rows(run_dir) if "val_loss" in row]
    assert evaluated[-1] == close(known["last_val_loss"])


@pytest.mark.slow
def test_every_run_is_listed_with_its_result(commands: Commands, recorded: Recorded) -> None:
    listed = json.loads(commands.do("list", "--json", folder=recorded.project).out)
    assert {each["run_id"] for each in listed} == set(RUNS)
    for each in listed:
        summary = read_json(recorded.run_dir(each["run_id"]) / "summary.json")
        assert each["status"] == summary["status"] == "finished"
        assert each["step"] == each["steps"] == summary["steps"]
        assert each["loss"] == summary["final_loss"]
        assert each["val_loss"] == summary["final_val_loss"]
        assert each["damaged"] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_has_a_status_with_its_ranks_and_a_log(
    commands: Commands, recorded: Recorded, name: str
) -> None:
    shown = json.loads(commands.do("status", name, "--json", folder=recorded.project).out)
    ranks = read_json(recorded.run_dir(name) / "ranks.json")["ranks"]
    assert [rank["node"] for rank in shown["ranks"]] == [rank["node"] for rank in ranks]
    assert {rank["step"] for rank in shown["ranks"]} == {shown["steps"]}
    assert {rank["exit_code"] for rank in shown["ranks"]} == {0}
    said = commands.do("logs", name, folder=recorded.project).out
    assert f"finished after step {shown['steps']}" in said


@pytest.mark.slow
@pytest.mark.parametrize("name", ADAPTERS)
def test_a_resumed_run_with_an_adapter_has_the_recorded_losses(
    continued: Recorded, name: str
) -> None:
    require_continued(continued.run_dir(name), name)


@pytest.mark.slow
@pytest.mark.ranks
def test_a_resumed_run_with_all_weights_has_the_recorded_losses_on_two_ranks(
    supervised: Recorded,
) -> None:
    require_continued(supervised.run_dir("full"), "full")
    state = read_json(supervised.run_dir("full") / "state.json")
    assert (state["status"], state["attempt"], state["resumes"]) == ("finished", 2, 1)
    assert [event["kind"] for event in state["events"]] == [
        *("start", "finished", "resume", "finished"),
    ]


EVALUATED = {"full": "text", "far": "text", "lora": "chat", "labels": "classify"}


@pytest.mark.parametrize(("name", "data"), EVALUATED.items())
def test_an_evaluation_gives_the_recorded_loss(
    commands: Commands, recorded: Recorded, name: str, data: str
) -> None:
    words = ("--checkpoint", f"runs/{name}", "--data", f"data/{data}", "--json")
    found = commands.do("evaluate", *words, folder=recorded.project).last_json()
    # Not recorded by the release that made the runs.
    length = {"text": 32, "chat": 64, "classify": 64}[data]
    assert found.pop("trained_sequence_length") == length
    known = expected()[name]["evaluate"]
    if data == "classify":
        known |= {"sequence_length": length}
    if data == "text":
        # That release left out the tokens after the last whole block, unlike the runs.
        loss = read_json(recorded.run_dir(name) / "summary.json")["final_val_loss"]
        known |= {"val_loss": loss, "perplexity": math.exp(loss), "val_tokens": 1290}
    numbers = {key: value for key, value in known.items() if isinstance(value, float)}
    assert found == known | {key: close(value) for key, value in numbers.items()}


def test_pairs_are_evaluated_with_the_base_at_its_new_place(
    commands: Commands, continued: Recorded
) -> None:
    words = ("--checkpoint", "runs/pairs", "--data", "data/preference", "--json")
    found = commands.do("evaluate", *words, folder=continued.project).last_json()
    assert found["val_loss"] == close(expected()["pairs"]["last_val_loss"])


@pytest.mark.parametrize("name", ["full", "lora"])
def test_the_greedy_text_is_the_recorded_one(
    commands: Commands, recorded: Recorded, name: str
) -> None:
    known = expected()[name]["generate"]
    words = ("--checkpoint", f"runs/{name}", "--prompt", known["prompt"], "--json")
    greedy = ("--temperature", "0", "--num-samples", "1", "--max-new-tokens", "16")
    assert commands.do("generate", *words, *greedy, folder=recorded.project).last_json() == known


def test_a_text_gets_the_recorded_label(commands: Commands, recorded: Recorded) -> None:
    known = expected()["labels"]["classify"]
    words = ("--classify", "--checkpoint", "runs/labels", "--json")
    prompt = ("--prompt", PROMPTS["labels"])
    found = commands.do("generate", *words, *prompt, folder=recorded.project).last_json()
    assert found["label"] == known["label"]
    assert found["scores"] == {label: close(score) for label, score in known["scores"].items()}


def export(commands: Commands, folder: Path, *words: str) -> Path:
    """Export in fp32, which rounds nothing; return the path of the export."""
    return folder / commands.do("export", *words, "--dtype", "fp32", folder=folder).out.strip()


def test_weights_are_exported_bit_for_bit(commands: Commands, recorded: Recorded) -> None:
    made = export(commands, recorded.project, "--checkpoint", "runs/full", "--format", "hf")
    stored = load_file(recorded.stored_checkpoint("full") / "model.safetensors")
    exported = load_file(made / "model.safetensors")
    assert stored.keys() == exported.keys()
    assert all(np.array_equal(stored[name], exported[name]) for name in stored)


@pytest.mark.parametrize(("name", "more"), [("full", ()), ("lora", ("--merge",))])
def test_weights_are_exported_as_gguf(
    commands: Commands, recorded: Recorded, name: str, more: Sequence[str]
) -> None:
    from gguf import GGUFReader

    words = ("--checkpoint", f"runs/{name}", *more)
    folder = export(commands, recorded.project, *words, "--format", "hf", "--out", "as-hf")
    weights = load_file(folder / "model.safetensors")
    file = export(commands, recorded.project, *words, "--format", "gguf")
    tensors = {tensor.name: tensor.data for tensor in GGUFReader(file).tensors}
    embedding = "transformer.wte.weight" if name == "full" else "model.embed_tokens.weight"
    assert np.array_equal(tensors["token_embd.weight"], weights[embedding])
    assert sum(each.size for each in tensors.values()) == sum(
        each.size for each in weights.values()
    )


def test_an_adapter_is_merged_into_its_base(commands: Commands, recorded: Recorded) -> None:
    made = export(commands, recorded.project, "--checkpoint", "runs/lora", "--merge")
    words = ("--checkpoint", str(made), "--data", "data/chat", "--json")
    found = commands.do("evaluate", *words, folder=recorded.project).last_json()
    assert found["val_loss"] == close(expected()["lora"]["evaluate"]["val_loss"])


def test_runs_are_reported_and_compared(commands: Commands, recorded: Recorded) -> None:
    for name in RUNS:
        commands.do("report", f"runs/{name}", folder=recorded.project)
        page = (recorded.run_dir(name) / "report.html").read_text(encoding="utf-8")
        summary = read_json(recorded.run_dir(name) / "summary.json")
        assert f"{summary['final_val_loss']:.4f}" in page
        assert summary["versions"]["torch"] in page
    page = (recorded.run_dir("lora") / "report.html").read_text(encoding="utf-8")
    sample = read_json(recorded.run_dir("lora") / "samples.json")["samples"][0]
    assert sample["after"] in page
    page = (recorded.run_dir("full") / "report.html").read_text(encoding="utf-8")
    operator = read_json(recorded.run_dir("full") / "profile" / "operators.json")["operators"][0]
    assert operator["name"] in page
    out = commands.do("compare", "runs/full", "runs/far", folder=recorded.project).out
    assert "full" in out and "far" in out


@pytest.mark.parametrize("task", ["text", "chat", "classify", "preference"])
def test_a_data_folder_is_verified(commands: Commands, recorded: Recorded, task: str) -> None:
    said = commands.do("data", "verify", f"data/{task}", folder=recorded.project).out
    meta = read_json(recorded.project / "data" / task / "meta.json")
    assert f"{meta['train_tokens']:,}" in said and f"{meta['val_tokens']:,}" in said
    if task in ("chat", "preference"):
        said = commands.do("data", "show", f"data/{task}", folder=recorded.project).out
        assert "<|im_start|>assistant" in said


def test_a_cluster_s_run_is_a_copy_that_a_new_run_can_begin_from(
    commands: Commands, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = commands.run(
        *("run", "--resume", "far", "--inventory", "local", "--set", "train.steps=9"),
        folder=recorded.project,
    )
    assert refused.status == 10 and "far" in refused.err
    assert len(rows(recorded.run_dir("far"))) == len(rows(FIXTURES / "project" / "runs" / "far"))
    sets = ("model.init=runs/far", "model.n_embd=16", "train.steps=3")
    words = ("--config", "text.toml", "--run-dir", "runs/begun")
    more = [word for each in sets for word in ("--set", each)]
    commands.do("train", *words, *more, folder=recorded.project)
    run = RunPaths(recorded.run_dir("begun"))
    used = {"data.dir": str(recorded.project / "data" / "text"), "model.init": "runs/far"}
    monkeypatch.chdir(recorded.project)
    assert (
        unapproved_settings(run, used) == {}
    )  # so that --run-dir resumes it without other options
    first = next(row["val_loss"] for row in rows(recorded.run_dir("begun")) if "val_loss" in row)
    assert first == close(read_json(recorded.run_dir("far") / "summary.json")["final_val_loss"])


def test_a_cluster_s_inventory_and_its_trial_are_planned_with(
    commands: Commands, recorded: Recorded
) -> None:
    words = ("plan", "text.toml", "--inventory", "rack.json", "--json")
    plan = json.loads(commands.do(*words, folder=recorded.project).out)
    assert {"hosts": plan["hosts"], "ranks": plan["ranks"]} == expected()["rack"]
    assert plan["inventory"] == read_json(recorded.project / "rack.json")
    trial = read_json(recorded.project / ".cluster" / "rack" / "trial.json")
    assert plan["plan"]["interfaces"] == trial["interfaces"]
    assert plan["plan"]["arithmetic"]["compute_s"] > 0  # only known from the trial
