"""A link in an untrusted folder never makes the program read or copy a file outside of it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from payload.core.errors import ConfigError, DataError, ExitCode
from payload.core.symlink_safety import inside_folder
from payload.data.__main__ import main
from payload.data.reading.blocks import TokenData
from payload.data.templates.chat_template import read_chat_template
from payload.data.tokenizer_files import tokenizer_files
from payload.data.tokenizers import load_tokenizer
from payload.data.writing.meta import write_meta
from payload.formats.data_folder import load_meta
from payload.formats.hf_folder import TOKENIZER_FILES, read_tokenizer_files
from payload.orchestrate.machine_profiles.code_and_data_uploads import local_weights
from tests.support.chat_data import make_model, make_tokenizer
from tests.support.data_folders import make_data_folder

SECRET = '{"password": "hunter2"}'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text(SECRET)
    return make_tokenizer(tmp_path / "model")


def linked(folder: Path, name: str) -> Path:
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(folder.parent / "secret")
    return folder


@pytest.mark.parametrize("name", [*TOKENIZER_FILES, "config.json"])
def test_no_file_of_a_tokenizer_may_be_a_link_out_of_its_folder(folder: Path, name: str) -> None:
    with pytest.raises(DataError, match="a link that leads out of its folder, to ") as refused:
        load_tokenizer(str(linked(folder, name)))
    assert str(refused.value).startswith(f"{folder / name}: ") and "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["special_tokens_map.json", "vocab.json", "added_tokens.json"])
def test_a_checkpoint_gets_no_file_that_a_link_leads_to(folder: Path, name: str) -> None:
    meta = load_meta(make_data_folder(folder.parent / "data"))
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text("{}")
    found = tokenizer_files(
        meta, data=folder.parent / "data", source=linked(folder, name), context=9
    )
    assert SECRET.encode() not in found.values() and name not in found


@pytest.mark.parametrize(
    "name", ["chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json"]
)
def test_a_chat_template_and_its_tokens_are_not_read_through_a_link(
    folder: Path, name: str
) -> None:
    with pytest.raises(DataError, match="a link that leads out of its folder"):
        read_chat_template(linked(folder, name))


@pytest.mark.processes  # a process renders the template
def test_named_templates_are_not_read_through_a_linked_folder(folder: Path) -> None:
    private = folder.parent / "private"
    private.mkdir()
    (private / "tool_use.jinja").write_text("private {{ messages }}")
    more = folder / "additional_chat_templates"
    more.symlink_to(private)
    with pytest.raises(DataError, match="a link that leads out of its folder"):
        read_chat_template(folder)
    more.unlink()
    private.rename(more)
    assert "private" in read_chat_template(folder).source


def test_a_link_is_not_sent_to_a_cluster(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(SECRET)
    model = make_model(tmp_path / "model")
    assert local_weights(str(model)) is not None
    with pytest.raises(ConfigError, match="a link that leads out of its folder"):
        local_weights(str(linked(model, "special_tokens_map.json")))


def test_the_links_of_the_hubs_cache_are_followed(folder: Path) -> None:
    snapshot = folder.parent / "models--a--b" / "snapshots" / "1234"
    blobs = snapshot.parents[1] / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(folder.iterdir())):
        shutil.copy(path, blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    assert load_tokenizer(str(snapshot)).sha256 == load_tokenizer(str(folder)).sha256
    assert read_tokenizer_files(snapshot, error=DataError) == read_tokenizer_files(
        folder, error=DataError
    )
    (snapshot / "added_tokens.json").symlink_to("../../../secret")
    with pytest.raises(DataError, match="a link that leads out of its folder"):
        load_tokenizer(str(snapshot))


@pytest.mark.parametrize("name", ["vocab.json", "added_tokens.json", "special_tokens_map.json"])
def test_what_is_not_json_is_not_copied(folder: Path, name: str) -> None:
    (folder / name).write_text("ssh-ed25519 AAAA")
    with pytest.raises(DataError, match=f"{name}: not JSON"):
        load_tokenizer(str(folder))


def test_a_link_to_itself_is_refused(folder: Path) -> None:
    (folder / "vocab.json").symlink_to("vocab.json")
    with pytest.raises(DataError, match=r"vocab\.json: "):
        load_tokenizer(str(folder))


def to_the_file(folder: Path) -> None:
    (folder / "x.txt").symlink_to(folder.parent / "secret")


def below(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "x.txt").symlink_to("../../secret")


@pytest.mark.parametrize("link", [to_the_file, below])
def test_a_folder_of_texts_has_no_link_to_other_texts(
    link: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "secret").write_text("a secret")
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(4):
        (texts / f"{number}.txt").write_text(f"text {number}")
    (texts / "same.txt").symlink_to("0.txt")
    words = ["prepare", "--source", "text", "--input", str(texts), "--quiet", "--out"]
    assert main([*words, str(tmp_path / "good")]) == ExitCode.OK
    link(texts)
    assert main([*words, str(tmp_path / "bad"), "--skip-bad"]) == ExitCode.CONFIG
    message = capsys.readouterr().err
    assert "x.txt: a link that leads out of its folder" in message and message.count("\n") == 1


@pytest.mark.parametrize("task", ["text", "classify"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
@pytest.mark.parametrize(
    "name", [".prepare.lock", ".prepare.jsonl", "train.bin.partial", "val.bin.partial"]
)
def test_prepare_writes_through_no_link_and_opens_no_pipe(
    name: str, kind: str, task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "secret").write_text(SECRET)
    out = tmp_path / "out"
    out.mkdir()
    if kind == "link":
        (out / name).symlink_to("../secret")
    else:
        os.mkfifo(out / name)
    rows = tmp_path / "in.jsonl"
    rows.write_text("".join(f'{{"text": "text {n}", "label": {n % 2}}}\n' for n in range(40)))
    words = ["prepare", "--source", "jsonl", "--input", str(rows), "--out", str(out), "--quiet"]
    assert main([*words, "--task", task]) == ExitCode.CONFIG
    message = capsys.readouterr().err
    assert f"{out / name}: not a regular file, or a link, so prepare does not" in message
    assert (tmp_path / "secret").read_text() == SECRET and not (out / "train.bin").exists()


@pytest.mark.parametrize("name", ["train.bin", "val.bin", "meta.json"])
def test_training_reads_no_data_outside_of_its_folder(name: str, tmp_path: Path) -> None:
    folder = make_data_folder(tmp_path / "data")
    (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(f"../{name}")
    with pytest.raises(DataError, match="a link that leads out of its folder"):
        TokenData.open(folder, sequence_length=8)
    (folder / name).unlink()
    (tmp_path / name).rename(folder / f"{name}.0")
    (folder / name).symlink_to(f"{name}.0")
    TokenData.open(folder, sequence_length=8)


def test_without_hashes_of_ranges_the_whole_file_is_compared(tmp_path: Path) -> None:
    folder = make_data_folder(tmp_path / "data")
    meta = load_meta(folder)
    files = {name: replace(file, range_sha256=()) for name, file in meta.files.items()}
    write_meta(folder, replace(meta, files=files))
    assert not TokenData.open(folder, sequence_length=8).has_range_hashes()
    path = folder / "train.bin"
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(
        DataError, match=r"train\.bin: its SHA-256 differs from the one in meta\.json\. "
    ):
        TokenData.open(folder, sequence_length=8)


def test_a_pipe_or_a_folder_in_the_place_of_a_data_file_is_one_line(tmp_path: Path) -> None:
    folder = make_data_folder(tmp_path / "data", num_val_tokens=2048)  # 4096 bytes, as a folder
    (folder / "val.bin").unlink()
    (folder / "val.bin").mkdir()
    with pytest.raises(DataError, match=r"val\.bin: Not a regular file, but meta\.json lists it"):
        load_meta(folder)


def test_a_format_that_reads_further_files_is_not_read_from_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "secret").write_text("a secret")
    task = tmp_path / "set" / "tasks" / "a"
    task.mkdir(parents=True)
    (task / "task.toml").write_text("[metadata]\n")
    (task / "instruction.md").symlink_to("../../../secret")
    (tmp_path / "set" / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files: tasks/*/task.toml\n---\n"
    )
    words = ["prepare", "--source", "hf", "--input", str(tmp_path / "set"), "--quiet"]
    words += ["--text-column", "instruction", "--out", str(tmp_path / "out")]
    assert main(words) == ExitCode.CONFIG
    message = capsys.readouterr().err
    assert "detects the format harbor, which can read files outside of the folder" in message
    assert not (tmp_path / "out").exists()


def test_what_a_path_leads_to_decides(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home-2").mkdir()
    (tmp_path / "home-2" / "file").write_text("")
    (tmp_path / "alias").symlink_to("home")
    (tmp_path / "home" / "inner").write_text("")
    assert inside_folder(tmp_path / "alias" / "inner") == tmp_path / "alias" / "inner"
    (tmp_path / "home" / "near").symlink_to("../home-2/file")
    with pytest.raises(OSError, match="leads out"):
        inside_folder(tmp_path / "home" / "near")
