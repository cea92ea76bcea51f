"""Every name of a model goes through one resolver: run ids, `latest`, folders, files, the hub."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest

from payload.core.errors import CheckpointError, DataError, ExitCode, UsageError
from payload.core.file_hash import sha256_of
from payload.data.tokenizers import load_tokenizer
from payload.evaluate.__main__ import main as evaluate
from payload.evaluate.__main__ import parser as evaluate_parser
from payload.export.__main__ import main as export
from payload.train.models.hf_weights import checkpoint_folder, save_hf
from payload.weights.run_names import path_of_run
from payload.weights.source import find_source, pinned_name_of
from tests.cli.parsers import all_parsers, options_of
from tests.generate.models import make_model
from tests.support.chat_data import make_tokenizer
from tests.support.data_folders import make_data_folder
from tests.test_checkpoint_listing import make_checkpoint

MADE = "chats-20261128-135100-bd1c"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of runs in the current folder, with two runs; the hub cannot be reached."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in (MADE, "first"):
        make_checkpoint(tmp_path / "runs" / name / "checkpoints" / "step_00000010")
    (tmp_path / "runs" / "latest").symlink_to("first")
    return tmp_path / "runs"


@pytest.mark.parametrize(("name", "run"), [(MADE, MADE), ("first", "first"), ("latest", "first")])
def test_a_run_id_and_latest_mean_the_run_s_newest_checkpoint(
    name: str, run: str, runs: Path
) -> None:
    expected = Path("runs", run, "checkpoints", "step_00000010").absolute()
    for found in (find_source(name, setting="model.init"), find_source(name, setting="--model")):
        assert found.folder is not None and found.folder.absolute() == expected
        assert found.kind == "folder"
    assert checkpoint_folder(name).absolute() == expected
    assert Path(pinned_name_of(name, setting="model.init")) == Path("runs", run)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        (MADE.replace("bd1c", "bd2c"), f"Did you mean {MADE}?"),
        ("other-20250101-000000-abcd", "tileforge list"),
        ("first-run-20261128-153430-0a1b", "tileforge list"),
        ("quickstart-20261128T153430Z-4711", "tileforge list"),
        ("./runs/fiirst", "Did you mean runs/first?"),
        ("runs/fiirst", "Did you mean first?"),
        ("runs/new", "no run of this id in runs"),
        ("./nothing.gguf", "the folder does not exist"),
    ],
)
def test_an_unknown_run_is_never_looked_up_on_the_hub(name: str, hint: str, runs: Path) -> None:
    with pytest.raises(CheckpointError) as error:
        find_source(name, setting="--model")
    assert hint in str(error.value) and "hub cannot" not in str(error.value)
    with pytest.raises(DataError, match="--tokenizer"):
        load_tokenizer(name)


def test_the_start_of_a_run_id_suggests_the_run_where_the_hub_has_no_such_model(runs: Path) -> None:
    with pytest.raises(CheckpointError, match=f"Did you mean {MADE}"):
        checkpoint_folder("chats")


def test_a_run_with_a_hub_model_s_name_is_ambiguous_and_a_local_folder_comes_first(
    runs: Path,
) -> None:
    make_checkpoint(runs / "gpt2" / "checkpoints" / "step_00000010")
    with pytest.raises(CheckpointError, match=r"ambiguous: a run and a hub model\. Use runs/gpt2"):
        find_source("gpt2", setting="model.init")
    own = runs.parent / "first"
    shutil.copytree(runs / "first" / "checkpoints" / "step_00000010", own)
    assert checkpoint_folder("first").absolute() == own


def test_a_folder_that_is_no_run_does_not_replace_a_hub_model(runs: Path) -> None:
    (runs / "distilgpt2").mkdir()
    (runs / "distilgpt2" / "config.json").write_text("{}")
    found = find_source("distilgpt2", setting="model.init")
    assert (found.kind, found.name) == ("hub", "distilgpt2")


@pytest.mark.parametrize("file", ["run.toml", "plan.json", "checkpoints/step_00000010"])
def test_a_run_instead_of_a_hub_model_is_logged_once(
    file: str, runs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    setting, path = f"{file} of model.init", runs / "distilgpt2" / file
    if path.suffix:
        path.parent.mkdir()
        path.touch()
    else:
        make_checkpoint(path)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            found = path_of_run("distilgpt2", setting=setting, error=UsageError)
            assert found == "runs/distilgpt2"
        path_of_run(MADE, setting=setting, error=UsageError)
    assert [each.getMessage() for each in caplog.records] == [
        f"{setting} = 'distilgpt2': using the run runs/distilgpt2, not the hub model of this name"
    ]


def test_latest_without_a_run_and_a_linked_folder_of_runs_are_errors(runs: Path) -> None:
    (runs / "latest").unlink()
    for name in ("latest", "runs/latest"):
        with pytest.raises(CheckpointError, match=f"= {name}: no run in runs has completed"):
            find_source(name, setting="--model")
    runs.rename(runs.with_name("elsewhere"))
    with pytest.raises(CheckpointError, match=r"no runs in runs yet\. Start one with: "):
        find_source("latest", setting="--model")
    runs.symlink_to("elsewhere")
    with pytest.raises(UsageError, match=f"--model .*elsewhere/{MADE}"):
        find_source(MADE, setting="--model")


def test_a_base_that_an_adapter_names_is_not_looked_up_among_the_runs(runs: Path) -> None:
    found = find_source("first", setting="base_model_name_or_path", takes_ids=False)
    assert found.kind == "hub"


def test_a_tokenizer_is_found_by_the_run_s_id(runs: Path) -> None:
    folder = runs / MADE / "checkpoints" / "step_00000010"
    (folder / "config.json").write_text("{}")
    make_tokenizer(folder)
    assert load_tokenizer(MADE).sha256 == load_tokenizer(f"runs/{MADE}").sha256


def test_every_program_that_reads_a_model_takes_model_and_the_older_spelling() -> None:
    parsers = all_parsers()
    for name in ("evaluate", "export", "generate", "finetune", "train.reference"):
        assert "--model" in options_of(parsers[name]), name
    for name in ("data prepare", "data show"):
        assert {"--model", "--tokenizer"} <= options_of(parsers[name])
    for name in ("evaluate", "export", "generate"):
        assert "--checkpoint" in options_of(parsers[name])
        assert "--checkpoint" not in parsers[name].format_full_help()
    parsed = evaluate_parser().parse_args(["--checkpoint=a", "--data", "b"])
    assert parsed.checkpoint == "a"


def test_evaluate_and_export_take_a_run_id(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = runs / MADE / "checkpoints" / "step_00000010"
    save_hf(make_model(sequence_length=32), folder)
    for name in ("manifest.json", "trainer.json", "optimizer.safetensors"):
        (folder / name).unlink()
    (folder / "manifest.json").write_text(_manifest_of(folder))
    data = make_data_folder(runs.parent / "data", num_val_tokens=200)
    words = ["--model", MADE, "--data", str(data), "--sequence-length", "32"]
    assert evaluate(words, {}) == ExitCode.OK
    assert MADE in capsys.readouterr().out
    assert export(["--model", "chats"]) == ExitCode.CONFIG
    assert f"Did you mean {MADE}?" in capsys.readouterr().err


def _manifest_of(folder: Path) -> str:
    (folder / "trainer.json").write_text("{}")
    (folder / "optimizer.safetensors").write_bytes(b"")
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in folder.iterdir()
        if path.name != "manifest.json"
    }
    return json.dumps({"schema_version": 1, "files": files})
