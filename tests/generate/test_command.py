"""`python -m payload.generate`, with valid and invalid input."""

from __future__ import annotations

import io
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from payload.core.errors import ExitCode
from payload.core.printable_text import printable
from payload.generate import __main__ as command
from payload.generate.__main__ import main
from payload.run_record.run_files import RunPaths
from payload.train.checkpoints.checkpoint import TrainerState, save_checkpoint
from payload.train.checkpoints.snapshot import Snapshot
from payload.train.models.base import CausalLM
from payload.train.models.hf_weights import save_hf
from tests.generate.models import make_model
from tests.support.waiting import DEADLINE_S

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).resolve().parents[2]

Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in the Hugging Face layout, which tests must not change."""
    path = tmp_path_factory.mktemp("saved")
    save_hf(make_model(), path)
    return path


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of that folder."""
    return shutil.copytree(saved, tmp_path / "hf")


def run_with_weights(root: Path, *, steps: tuple[int, ...]) -> RunPaths:
    """Make a run folder with a checkpoint after each of `steps`, each with different weights."""
    paths = RunPaths(root)
    paths.checkpoints.mkdir(parents=True)
    for step in steps:
        state = TrainerState(
            step=step,
            next_sample=0,
            tokens=0,
            seed=0,
            dtype="fp32",
            train_sha256="",
            world_size=1,
        )
        model = make_model(seed=step)
        save_checkpoint(
            paths.checkpoint(step),
            model=model,
            snapshot=Snapshot.of(model, {}),
            state=state,
            tokenizer={},
        )
    return paths


def generate(*arguments: str, source: Path) -> int:
    return main(["--checkpoint", str(source), "--max-new-tokens", "8", *arguments])


def test_text_goes_to_stdout_and_messages_to_stderr(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert generate("--prompt", "def ", "--num-samples", "2", source=folder) == ExitCode.OK
    done = capfd.readouterr()
    first, second = done.out.split("\n---\n")
    assert first.startswith("def ") and second.startswith("def ")
    assert first != second
    assert "model:" in done.err and "tokens/s" in done.err


@contextmanager
def started(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Yield the command while it generates an endless text."""
    words = [sys.executable, "-m", "payload.generate", "--checkpoint", str(folder)]
    words += ["--prompt", "def ", "--max-new-tokens", "1000000", *arguments]
    process = subprocess.Popen(
        words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.processes
@pytest.mark.parametrize("samples", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_text_is_printed_as_it_is_made_and_ctrl_c_keeps_it(folder: Path, samples: int) -> None:
    with started(folder, "--num-samples", str(samples)) as process:
        assert process.stdout is not None and process.stderr is not None
        first = b""
        while len(first) < 100:
            # The command never ends, so all output that can be read was streamed.
            more = process.stdout.read(10)
            assert more, process.stderr.read()
            first += more
        process.send_signal(signal.SIGINT)
        rest, error = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    assert b"Traceback" not in error
    texts = (first + rest).decode().removesuffix("\n").split("\n---\ndef ")
    assert first.startswith(b"def ") and len(texts) == samples
    assert all(len(text) > 20 for text in texts)


@pytest.mark.slow
@pytest.mark.processes
def test_ctrl_c_leaves_whole_json_of_what_was_made(folder: Path) -> None:
    with started(folder, "--json") as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith(b"model: ")
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130 and b"Traceback" not in error
    assert len(json.loads(out)["samples"]) == 3


def test_a_signal_leaves_whole_json_of_what_was_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In this process, with the signal raised while text is generated."""
    print_model = command._print_model

    def print_and_interrupt(weights: str, model: CausalLM) -> None:
        print_model(weights, model)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(command, "_print_model", print_and_interrupt)
    assert generate("--json", source=folder) == 130
    done = capfd.readouterr()
    assert done.err.startswith("model: ") and "Traceback" not in done.err
    assert len(json.loads(done.out)["samples"]) == 3


@pytest.mark.processes
def test_a_reader_that_leaves_ends_the_command_without_a_traceback(folder: Path) -> None:
    with started(folder) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        error = process.stderr.read()
        assert process.wait(DEADLINE_S) == 141
    assert b"Traceback" not in error and b"BrokenPipe" not in error


def test_json_carries_every_sample(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate("--json", "--seed", "5", source=folder) == ExitCode.OK
    result = json.loads(capsys.readouterr().out)
    assert result["prompt"] == "It is interesting"
    assert [row["seed"] for row in result["samples"]] == [5, 6, 7]
    assert all(row["num_tokens"] <= 8 for row in result["samples"])


def test_the_prompt_can_come_from_a_file(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "it's a prompt.txt"
    file.write_text("Grüße, 世界\n", encoding="utf-8")
    assert generate("--prompt-file", str(file), source=folder) == ExitCode.OK
    assert capsys.readouterr().out.startswith("Grüße, 世界\n")


class Terminal(io.StringIO):
    """A fake terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_escape_sequences_reach_a_pipe_and_no_terminal(
    stream: type[io.StringIO], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = stream()
    monkeypatch.setattr("sys.stdout", out)
    hostile = "a\x1b]0;owned\x07\x9b2Jb\u202e"
    assert generate("--prompt", hostile, source=folder) == ExitCode.OK
    said = out.getvalue()
    if stream is Terminal:
        assert said.startswith("ab") and said == printable(said)
    else:
        assert said.startswith(hostile)


@pytest.mark.parametrize("prompt", ["", "\x00", "<|endoftext|>", "\U0001f600" * 3, "a" * 5000])
def test_any_prompt_is_continued(
    prompt: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate("--json", "--prompt", prompt, source=folder) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["prompt"] == prompt


def test_a_prompt_that_outgrows_the_context_is_said_to_be_cut(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate("--prompt", "one two " * 100, source=folder) == ExitCode.OK
    assert "the model reads the last 64" in capsys.readouterr().err


def test_a_run_means_its_newest_valid_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = run_with_weights(tmp_path / "run", steps=(1, 2, 3))
    (paths.checkpoint(3) / "model.safetensors").write_bytes(b"torn")
    assert generate("--json", source=paths.root) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["checkpoint"] == str(paths.checkpoint(2))


def test_one_checkpoint_of_a_run_can_be_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = run_with_weights(tmp_path / "run", steps=(1, 2))
    assert generate("--json", source=paths.checkpoint(1)) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["checkpoint"] == str(paths.checkpoint(1))


def test_weights_with_nan_are_one_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model()
    with torch.no_grad():
        model.ln_f.weight[3] = torch.nan
    save_hf(model, tmp_path)
    assert generate("--prompt", "Once", source=tmp_path) == ExitCode.CONFIG
    said = capsys.readouterr()
    assert said.out == ""
    (error,) = (line for line in said.err.splitlines() if line.startswith("error: "))
    assert "the model's logits are NaN or infinite" in error


def cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def empty_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def other_model(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")


def other_size(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"n_embd": 64}), encoding="utf-8")


def other_vocabulary(folder: Path) -> None:
    save_hf(make_model(vocab_size=100), folder)


@pytest.mark.parametrize(
    "damage",
    [cut_weights, empty_weights, no_weights, no_config, other_model, other_size, other_vocabulary],
)
def test_a_damaged_folder_ends_in_one_line(
    damage: Damage, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(folder)
    assert generate(source=folder) == ExitCode.CONFIG
    error = capsys.readouterr().err.splitlines()
    assert error[-1].startswith("error: ") and len(error) <= 2


@pytest.mark.parametrize(
    "name", ["runs/none", "/no/such/folder", "../no", "a b", "it's;x", "$HOME"]
)
def test_a_folder_that_is_not_there_ends_in_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert main(["--checkpoint", name]) == ExitCode.CONFIG
    (error,) = capsys.readouterr().err.splitlines()
    assert ("no run of this id" if name == "runs/none" else "the folder does not exist") in error


def test_a_run_without_a_checkpoint_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = run_with_weights(tmp_path / "run", steps=())
    assert generate(source=paths.root) == ExitCode.CONFIG
    assert "no valid checkpoint" in capsys.readouterr().err


def test_a_checkpoint_that_differs_from_its_manifest_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = run_with_weights(tmp_path / "run", steps=(1,))
    save_hf(make_model(seed=9), paths.checkpoint(1))
    assert generate(source=paths.checkpoint(1)) == ExitCode.CONFIG
    assert "manifest" in capsys.readouterr().err


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"])
def test_a_prompt_file_that_cannot_be_read_ends_in_one_line(
    content: bytes | None, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompt.txt"
    if content is not None:
        file.write_bytes(content)
    assert generate("--prompt-file", str(file), source=folder) == ExitCode.CONFIG
    (error,) = capsys.readouterr().err.splitlines()
    assert str(file) in error


@pytest.mark.parametrize(
    "wrong",
    [
        ["--max-new-tokens", "0"],
        ["--temperature", "-1"],
        ["--temperature", "nan"],
        ["--temperature", "inf"],
        ["--top-k", "-1"],
        ["--top-k", "abc"],
        ["--num-samples", "-3"],
        ["--seed", "x"],
        ["--seed", str(2**63)],
        ["--seed", str(-(2**63) - 1)],
        ["--prompt", "a", "--prompt-file", "b"],
    ],
)
def test_a_wrong_argument_is_a_usage_error(
    wrong: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        generate(*wrong, source=folder)
    assert ended.value.code == ExitCode.USAGE
    message = capsys.readouterr().err.splitlines()[-1]
    assert wrong[0] in message
    assert "_positive" not in message


def test_the_help_has_every_default_except_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["--help-all"])
    text = " ".join(capsys.readouterr().out.split())
    for default in ("'It is interesting'", 100, 0.8, 200, 3, 1337):
        assert f"(default: {default}" in text
    assert "None" not in text


def test_the_extreme_seeds_are_taken(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (2**63 - 1, -(2**63)):
        assert generate("--seed", str(seed), "--json", source=folder) == ExitCode.OK
        assert json.loads(capsys.readouterr().out)["samples"][2]["seed"] == seed + 2


def test_top_k_of_zero_chooses_among_all(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for top_k in ("0", "50257", "1"):
        assert generate("--json", "--temperature", "9", "--top-k", top_k, source=folder) == 0
        texts.append([row["text"] for row in json.loads(capsys.readouterr().out)["samples"]])
    assert texts[0] == texts[1] != texts[2]


def test_a_model_with_another_vocabulary_gets_a_note(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    larger = tmp_path / "larger"
    larger.mkdir()
    save_hf(make_model(vocab_size=50304), larger)
    assert generate("--num-samples", "1", source=larger) == ExitCode.OK
    assert "vocabulary has 50304 tokens, GPT-2's has 50257" in capsys.readouterr().err
    assert generate("--num-samples", "1", source=folder) == ExitCode.OK
    assert "vocabulary" not in capsys.readouterr().err
