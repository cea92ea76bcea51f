"""`hf` and `openwebtext`: local folders, and a fake hub on a local port."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from huggingface_hub import constants

from payload.core.errors import ExitCode
from payload.data.__main__ import main
from payload.data.sources.hub import OPENWEBTEXT, OPENWEBTEXT_REVISION
from payload.data.sources.source_flags import SourceRequest
from payload.data.tasks.text_source import build_source
from payload.formats.data_folder import load_meta
from tests.data.fake_hub import COMMIT, Hub, fake_hub, serving
from tests.data.running import read_bin, reference_tokens, run_here
from tests.support.chat_data import make_tokenizer

pytestmark = pytest.mark.processes

HubCommands = tuple[Path, dict[str, subprocess.CompletedProcess[str]]]

TEXTS = [f"Document {i}: caf\u00e9 {'word ' * (i % 40)}" for i in range(3000)]


def write_dataset(root: Path, texts: Sequence[str], *, files: int = 3) -> Path:
    """Write parquet files as on the hub, with another column."""
    folder = root / "plain_text"
    folder.mkdir(parents=True)
    size = -(-len(texts) // files)
    for index in range(files):
        part = list(texts[index * size : (index + 1) * size])
        table = pa.table({"id": list(range(len(part))), "text": part})
        name = f"train-{index:05}-of-{files:05}.parquet"
        pq.write_table(table, folder / name, row_group_size=100)
    return root


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("dataset") / "owt", TEXTS)


def all_tokens(folder: Path) -> list[int]:
    """Return the tokens of both files, in any order."""
    parts = [read_bin(folder / name) for name in ("train.bin", "val.bin")]
    return sorted(np.concatenate(parts).tolist())


@pytest.mark.parametrize("kind", ["hf", pytest.param("openwebtext", marks=pytest.mark.slow)])
def test_local_parquet_folder_is_read_whole(kind: str, dataset: Path, tmp_path: Path) -> None:
    args = ["--source", kind, f"--input={dataset}", f"--out={tmp_path / 'out'}", "--quiet"]
    assert main(["prepare", *args]) == 0
    meta = load_meta(tmp_path / "out")
    assert meta.split.method == "permutation"
    assert meta.train_documents + meta.val_documents == len(TEXTS)
    assert all_tokens(tmp_path / "out") == sorted(reference_tokens(TEXTS).tolist())


def test_local_folder_of_jsonl_is_streamed_through_datasets(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    (tmp_path / "set" / "train.jsonl").write_text(lines)
    args = ["--source", "hf", f"--input={tmp_path / 'set'}", "--quiet", "--val-fraction", "0.01"]
    assert main(["prepare", *args, f"--out={tmp_path / 'out'}"]) == 0
    assert load_meta(tmp_path / "out").split.method == "permutation"
    assert all_tokens(tmp_path / "out") == sorted(reference_tokens(TEXTS).tolist())


def write_splits(folder: Path, **counts: int) -> Path:
    """Write conversations as one file for each split."""
    folder.mkdir()
    for split, count in counts.items():
        rows = [json.dumps({"question": f"{split} {n}", "answer": "yes"}) for n in range(count)]
        (folder / f"{split}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("counts", "val", "note"),
    [
        (
            {"train": 30, "validation": 7, "test": 5},
            7,
            "splits of the dataset: train for training, validation for validation; left out: "
            "'test' (choose with --split)",
        ),
        ({"train": 30, "test": 5}, 3, "train for training; left out: 'test'"),
        ({"train": 30}, 3, None),
    ],
)
def test_the_validation_split_of_a_dataset_is_for_validation_and_others_are_named(
    counts: dict[str, int],
    val: int,
    note: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = write_splits(tmp_path / "set", **counts)
    model = make_tokenizer(tmp_path / "model")
    args = ["--task", "chat", "--source", "hf", f"--input={folder}", f"--tokenizer={model}"]
    assert main(["prepare", *args, f"--out={tmp_path / 'out'}", "--packing=none"]) == 0
    meta = load_meta(tmp_path / "out")
    assert (meta.val_documents, meta.train_documents) == (val, 30 if val == 7 else 27)
    said = capsys.readouterr().err
    assert (note or "splits of the dataset") in said if note else "splits of the" not in said
    # A split that the user chose is read alone.
    chosen = [*args, "--split=train", "--packing=none", f"--out={tmp_path / 'chosen'}"]
    assert main(["prepare", *chosen]) == 0
    assert load_meta(tmp_path / "chosen").val_documents == 3


def test_texts_of_a_dataset_name_the_splits_that_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_splits(tmp_path / "set", train=30, validation=7)
    args = ["--source", "hf", f"--input={folder}", "--text-column", "question", "--dry-run"]
    assert main(["prepare", *args, f"--out={tmp_path / 'out'}"]) == 0
    assert "train for training; left out: 'validation' (choose with --split)" in " ".join(
        capsys.readouterr().out.split()
    )


def test_folder_that_datasets_saved_is_read(tmp_path: Path) -> None:
    Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "saved")
    args = ["--source", "hf", f"--input={tmp_path / 'saved'}", f"--out={tmp_path / 'out'}"]
    assert main(["prepare", *args, "--quiet"]) == 0
    assert all_tokens(tmp_path / "out") == sorted(reference_tokens(TEXTS).tolist())


@pytest.mark.slow
@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_reading_resumes_at_any_cursor(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("payload.data.sources.documents.BATCH_BYTES", 100_000)
    if form == "parquet":
        folder = write_dataset(tmp_path / "set", TEXTS)
    else:
        folder = tmp_path / "set"
        folder.mkdir()
        lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
        (folder / "train.jsonl").write_text(lines)
    request = SourceRequest(kind="hf", inputs=(str(folder),))
    source = build_source(request)
    source.identity()
    source.survey()
    batches = list(source.batches({}))
    assert len(batches) > 2
    for index, batch in enumerate(batches[:-1]):
        again = build_source(request)
        again.identity()
        cursor = json.loads(json.dumps(batch.cursor))
        rest = [number for later in again.batches(cursor) for number in later.numbers]
        assert rest == [number for later in batches[index + 1 :] for number in later.numbers]


@contextmanager
def hub_at(endpoint: str, *, home: Path) -> Iterator[None]:
    """Point the hub's client at this address, with a new empty cache.

    The client and `datasets` read both from the environment when they are imported. The environment
    is for the process that reads parquet files.
    """
    places = {
        "HF_HOME": str(home),
        "HF_HUB_CACHE": str(home / "hub"),
        "HUGGINGFACE_HUB_CACHE": str(home / "hub"),
        "ENDPOINT": endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_DISABLE_XET": True,
    }
    cache = home / "datasets"
    of_datasets = {
        "HF_ENDPOINT": endpoint,
        "HF_CACHE_HOME": str(home),
        "HF_DATASETS_CACHE": cache,
        "DOWNLOADED_DATASETS_PATH": cache / "downloads",
        "EXTRACTED_DATASETS_PATH": cache / "downloads" / "extracted",
        "HF_MODULES_CACHE": str(home / "modules"),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", endpoint)
        patch.setenv("HF_HOME", str(home))
        for name, value in places.items():
            patch.setattr(constants, name, value)
        for name, value in of_datasets.items():
            patch.setattr(datasets.config, name, value)
        yield


@pytest.fixture(scope="module")
def hub_commands(tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> HubCommands:
    """Commands with a hub on a local port, then some without a hub; all write below one folder."""
    root = tmp_path_factory.mktemp("asked")
    words = ["prepare", "--source", "hf", "--input", OPENWEBTEXT, "--out", root / "out"]
    other = ["prepare", "--source", "hf", "--input", "no/such", "--out", root / "b"]
    gone = ["prepare", "--source", "hf", "--input", "a/b", "--out", root / "c", "--quiet"]
    with (
        fake_hub(dataset, dataset=OPENWEBTEXT) as endpoint,
        hub_at(endpoint, home=root / "home"),
    ):
        done = {
            "named": run_here(*words),
            "missing": run_here(*other),
        }
        # A cloned project has folders with these names that contain other texts.
        for name in (OPENWEBTEXT, "a/b"):
            (root / "clone" / name).mkdir(parents=True)
            (root / "clone" / name / "train.jsonl").write_text('{"text": "planted"}\n' * 300)
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(root / "clone")
            pinned = ["prepare", "--source", "openwebtext", "--out", root / "pinned"]
            done["pinned"] = run_here(*pinned)
            done["ambiguous"] = run_here(*gone)
            folder = ["prepare", "--source", "hf", "--input", "./a/b", "--out", root / "d"]
            done["folder"] = run_here(*folder, "--val-fraction", "0.1", "--quiet")
    with hub_at("http://127.0.0.1:9", home=root / "empty_home"):
        done["ready"] = run_here(*words, "--revision", COMMIT)
        done["unreachable"] = run_here(*gone)
    return root, done


@pytest.mark.slow
def test_parquet_is_requested_at_a_fixed_commit(hub_commands: HubCommands) -> None:
    root, done = hub_commands
    assert done["named"].returncode == 0, done["named"].stderr
    meta = load_meta(root / "out")
    assert meta.revision == COMMIT
    assert meta.split.method == "permutation"
    assert all_tokens(root / "out") == sorted(reference_tokens(TEXTS).tolist())
    assert done["missing"].returncode == 10
    assert "has no public dataset no/such. Check the name" in done["missing"].stderr
    # A finished folder is found ready without a hub.
    assert done["ready"].returncode == 0, done["ready"].stderr
    assert "nothing to do" in done["ready"].stderr


@pytest.mark.slow
def test_openwebtext_is_pinned(hub_commands: HubCommands) -> None:
    source = build_source(SourceRequest(kind="openwebtext"))
    assert source.identity()[-2:] == [OPENWEBTEXT, OPENWEBTEXT_REVISION]
    root, done = hub_commands
    assert done["pinned"].returncode == 0, done["pinned"].stderr
    meta = load_meta(root / "pinned")
    assert meta.revision == OPENWEBTEXT_REVISION
    assert meta.train_documents + meta.val_documents == len(TEXTS), "not the clone's folder"


@pytest.mark.slow
def test_a_local_folder_never_replaces_a_dataset_of_the_hub(hub_commands: HubCommands) -> None:
    root, done = hub_commands
    assert done["ambiguous"].returncode == ExitCode.USAGE
    assert done["ambiguous"].stderr == (
        "error: --input = 'a/b' is ambiguous: a local folder, and possibly a hub dataset. Use "
        "./a/b; for the hub dataset, run the command in another folder.\n"
    )
    assert done["folder"].returncode == 0, done["folder"].stderr
    meta = load_meta(root / "d")
    assert (meta.source, meta.revision) == ("hf: folder ./a/b, split train", None)


@pytest.mark.slow
def test_unreachable_hub_is_one_clear_line(hub_commands: HubCommands) -> None:
    result = hub_commands[1]["unreachable"]
    assert result.returncode == 10
    assert result.stderr.startswith("error: the Hugging Face hub cannot be reached for a/b (")
    assert "--input FOLDER" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--split", "test"], "split 'test' not found. Choose one with --split: train"),
        pytest.param(
            ["--text-column", "id"], "column 'id' is int64, not text", marks=pytest.mark.slow
        ),
        (["--text-column", "body"], "no column 'body'; its columns: 'id', 'text'"),
        (["--config", "other"], "'other' not found"),
    ],
)
def test_a_wrong_choice_within_a_dataset_lists_the_valid_ones(
    more: list[str],
    message: str,
    dataset: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    args = ["--source", "hf", f"--input={dataset}", f"--out={tmp_path / 'out'}", "--quiet", *more]
    assert main(["prepare", *args]) == 10
    complaint = capsys.readouterr().err
    assert message in complaint
    assert complaint.count("\n") == 1


def card(place: str) -> str:
    files = {"data_files": [{"split": "train", "path": place}]}
    return json.dumps({"configs": [{"config_name": "default", **files}]})


@pytest.mark.parametrize("form", ["README.md", ".huggingface.yaml"])
@pytest.mark.parametrize(
    "place", ["/ABSOLUTE", "../outside.jsonl", "sub/../../outside.jsonl", "URL"]
)
def test_a_card_names_no_data_outside_of_its_folder(
    place: str, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:20])
    (tmp_path / "outside.jsonl").write_text(lines)
    folder = tmp_path / "set"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.jsonl").write_text(lines)
    requests: list[str] = []

    class Web(Hub):
        def answer(self, *, with_body: bool) -> None:
            requests.append(self.path)
            self.send(lines.encode(), {}, with_body=with_body)

    with serving(Web) as endpoint:
        place = place.replace("/ABSOLUTE", str(tmp_path / "outside.jsonl"))
        place = place.replace("URL", f"{endpoint}/leak.jsonl")
        text = card(place)
        (folder / form).write_text(f"---\n{text}\n---\n" if form == "README.md" else text)
        words = ["prepare", "--source", "hf", "--input", str(folder), "--quiet"]
        assert main([*words, "--out", str(tmp_path / "out")]) == 10
    message = capsys.readouterr().err
    assert f"{folder / form}: the data file " in message and "outside of the folder" in message
    assert message.count("\n") == 1 and not requests and not (tmp_path / "out").exists()


def test_a_card_may_name_data_in_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    (folder / "sub").mkdir(parents=True)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:20])
    (folder / "sub" / "a.jsonl").write_text(lines)
    (folder / "README.md").write_text(f"---\n{card('sub/*.jsonl')}\n---\n")
    args = ["--source", "hf", f"--input={folder}", f"--out={tmp_path / 'out'}", "--quiet"]
    assert main(["prepare", *args, "--val-fraction", "0.1"]) == 0
    assert all_tokens(tmp_path / "out") == sorted(reference_tokens(TEXTS[:20]).tolist())


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_link_in_a_dataset_does_not_lead_out_of_it(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outside = tmp_path / f"outside.{form}"
    if form == "jsonl":
        outside.write_text('{"text": "secret"}\n' * 20)
    else:
        pq.write_table(pa.table({"text": ["secret"] * 20}), outside)
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / f"train.{form}").symlink_to(outside)
    args = ["--source", "hf", f"--input={tmp_path / 'set'}", f"--out={tmp_path / 'out'}"]
    assert main(["prepare", *args, "--quiet"]) == 10
    message = capsys.readouterr().err
    assert "is outside of the folder. Move" in message and message.count("\n") == 1


def test_a_card_at_the_hub_names_no_file_of_this_machine(tmp_path: Path) -> None:
    secret = tmp_path / "secret.jsonl"
    secret.write_text('{"text": "secret"}\n' * 20)
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.jsonl").write_text('{"text": "public"}\n' * 20)
    (tmp_path / "set" / "README.md").write_text(f"---\n{card(str(secret))}\n---\n")
    words = ["prepare", "--source", "hf", "--input", "a/b", "--out", tmp_path / "out", "--quiet"]
    with (
        fake_hub(tmp_path / "set", dataset="a/b") as endpoint,
        hub_at(endpoint, home=tmp_path / "home"),
    ):
        done = run_here(*words)
    assert done.returncode == 10, done.stderr
    assert "Data files don't belong to a/b" in done.stderr


def test_a_folder_without_data_files_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    args = ["--source", "hf", f"--input={tmp_path / 'empty'}", f"--out={tmp_path / 'out'}"]
    assert main(["prepare", *args, "--quiet"]) == 10
    assert "doesn't contain any data files" in capsys.readouterr().err
