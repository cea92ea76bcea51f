"""Invalid inputs to fine-tuning: one line with cause and fix, exit code 10, no file written."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from payload.core.errors import ExitCode, TileforgeError
from payload.data.__main__ import main as data
from payload.export.__main__ import main as export
from payload.finetune.__main__ import main as finetune
from payload.formats.checkpoint_listing import config_sha256, weights_sha256
from payload.orchestrate.__main__ import main as orchestrate
from tests.support.accelerate_state import forget_accelerate
from tests.support.chat_data import conversations, make_model, make_tokenizer, prepare, write_rows
from tests.support.launching import mpirun, run, train_program
from tests.train.alone import train_alone

pytestmark = pytest.mark.processes  # a process renders the template

USER = {"role": "user", "content": "what is red"}
ANSWER = {"role": "assistant", "content": "a word"}
OR_SKIP = "Correct the row, or skip such rows with --skip-bad."
WRITE_LIST = f'Write [{{"role": ..., "content": ...}}, ...]. {OR_SKIP}'
NO_TEMPLATE = (
    "Use a model that was trained for chat, set a template with --chat-template (prepare), or "
    "leave --chat out (generate)."
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a tokenizer without a template, and conversations; must not be changed."""
    folder = tmp_path_factory.mktemp("invalid")
    make_model(folder / "model")
    make_tokenizer(folder / "no-template", template=None)
    rows = [{"messages": each} for each in conversations(40)]
    chats = write_rows(folder / "chats.jsonl", rows)
    prepare(folder / "model", chats, folder / "data", "--sequence-length", 64)
    (folder / "defaults.toml").touch()
    return folder


def require_refusal(capsys: pytest.CaptureFixture[str], status: int, sentence: str) -> None:
    """Require exactly this error, and no other error line."""
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert status == ExitCode.CONFIG, said
    assert said == [f"error: {sentence}"]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (
            {"messages": [USER]},
            "no message has role 'assistant', so there is nothing to train on. Add the answer. "
            f"{OR_SKIP}",
        ),
        (
            {"messages": [{"role": "robot", "content": "x"}, ANSWER]},
            "messages[0]: unknown role 'robot'. Use one of: system, developer, user, human, "
            "assistant, gpt, chatgpt, bot, ai, bing, bard, model, tool, function, observation, "
            f"tool_response, ipython, function_call, tool_call. {OR_SKIP}",
        ),
        (
            {"messages": []},
            f"messages is an empty list. Add messages, or remove the row. {OR_SKIP}",
        ),
        ({"messages": "hello"}, f"messages is 'hello', not a list of messages. {WRITE_LIST}"),
        (
            {"messages": [{"role": "user"}, ANSWER]},
            "messages[0] is {'role': 'user'}. A message needs the keys 'role' and 'content'. "
            + OR_SKIP,
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": 3}]},
            f"messages[1] content is 3, not text. {OR_SKIP}",
        ),
        (
            {"question": "a", "reply": "b"},
            "no conversation in the columns 'question', 'reply'. Formats: messages; conversations; "
            "conversation; prompt, completion; instruction, output; instruction, response; "
            "question, answer; question, response; query, response; query, answer; prompt, "
            "response; problem, solution; user, assistant; input, output. Map your columns to "
            "known names with --columns, such as --columns QUESTION=user,ANSWER=assistant. "
            f"{OR_SKIP}",
        ),
        (
            {"prompt": "a", "completion": None},
            f"completion is None, not text and not a list of messages. {OR_SKIP}",
        ),
        (
            {"conversations": [{"from": "human", "value": "a"}]},
            "no message has role 'assistant', so there is nothing to train on. Add the answer. "
            f"{OR_SKIP}",
        ),
        (
            {"instruction": 3, "output": "b"},
            f"instruction is 3, not text and not a list of messages. {OR_SKIP}",
        ),
    ],
)
def test_a_conversation_that_is_none(
    place: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    row: dict[str, object],
    problem: str,
) -> None:
    source = write_rows(tmp_path / "x.jsonl", [row] * 12)
    words = ["prepare", "--task", "chat", "--source", "jsonl", "--input", str(source)]
    words += ["--tokenizer", str(place / "model"), "--out", str(tmp_path / "out")]
    require_refusal(capsys, data(words), f"{source} line 1: {problem}")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flags", "tokenizer", "problem"),
    [
        (
            (),
            "no-template",
            "{place}/no-template: the model has no chat template (chat_template.jinja). "
            + NO_TEMPLATE,
        ),
        (
            ("--sequence-length", "2"),
            "model",
            "no conversation with trained tokens in jsonl: {place}/chats.jsonl: 40 rows, 0 bad, 40 "
            "with empty answers or answers beyond --sequence-length. Check the columns, or raise "
            "--sequence-length.",
        ),
        (
            ("--chat-template", "nowhere.jinja"),
            "model",
            "nowhere.jinja: cannot be read ([Errno 2] No such file or directory: "
            "'nowhere.jinja'). Use a Jinja file.",
        ),
        (
            (),
            "nowhere/",
            "--tokenizer 'nowhere/': the folder does not exist. Use a folder with tokenizer.json, "
            "a run, a hub name (owner/name[@revision]) or gpt2.",
        ),
    ],
)
def test_a_template_or_a_length_that_leaves_nothing_to_train_on(
    place: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    tokenizer: str,
    problem: str,
) -> None:
    words = ["prepare", "--task", "chat", "--source", "jsonl"]
    words += ["--input", str(place / "chats.jsonl"), "--out", str(tmp_path / "out"), *flags]
    name = tokenizer if tokenizer.endswith("/") else str(place / tokenizer)
    sentence = problem.replace("{place}", str(place))
    require_refusal(capsys, data([*words, "--tokenizer", name]), sentence)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("task", ["chat", "classify", "preference"])
def test_a_file_without_rows(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], task: str
) -> None:
    source = tmp_path / "x.jsonl"
    source.touch()
    words = ["prepare", "--task", task, "--source", "jsonl", "--input", str(source)]
    words += ["--tokenizer", str(place / "model"), "--out", str(tmp_path / "out")]
    sentence = f"jsonl: {source}: no rows. Add rows, or use another source."
    require_refusal(capsys, data(words), sentence)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("table", "flags", "problem"),
    [
        (
            "text,label\nred,a\nblue,a\n",
            (),
            "csv: {csv}: every text has the label 'a'. A classifier needs two or more labels. "
            "Check --label-column and --label-map.",
        ),
        (
            "text,label\nred,a\nblue,a\nlist,b\n",
            (),
            "csv: {csv}: label 'b' has only one text, which leaves none for validation. Add texts, "
            "or merge labels with --label-map.",
        ),
        (
            'text,label\n"red,a\nblue,b\n',
            (),
            "{csv} line 2: not CSV in UTF-8: unexpected end of data. Correct the quotes: put a "
            'field with delimiters or line ends in "...", and write a " inside the field as "".',
        ),
        (
            "text,label\nred,a,b\n",
            (),
            f"{{csv}} line 2: 3 fields, but 2 columns (text, label). {OR_SKIP}",
        ),
        (
            "text,text\nred,a\n",
            (),
            "{csv} line 1: 'text', 'text': column names are missing or repeated. Begin the file "
            "with a line of unique column names.",
        ),
        (
            "text,stars\nred,1\n",
            (),
            "{csv} line 2: no column 'label'; its columns: 'text', 'stars'. Choose one with "
            "--label-column.",
        ),
        (
            "essay,page,label\nred,a,1\n",
            (),
            "{csv} line 2: no column 'text'; its columns: 'essay', 'page', 'label'. Choose one "
            "with --text-column.",
        ),
        ("text,label\n,a\nblue,b\n", (), f"{{csv}} line 2: 'text' is empty. {OR_SKIP}"),
        (
            "text,label\nred,\nblue,b\n",
            (),
            f"{{csv}} line 2: 'label' is '', not a name or number. {OR_SKIP}",
        ),
        (
            "text,label\nred,3\nblue,1\n",
            ("--label-map", "1=low"),
            f"{{csv}} line 2: label '3' is not in --label-map. {OR_SKIP}",
        ),
        (
            "",
            (),
            "csv: {csv}: no rows. Add rows, or use another source.",
        ),
    ],
)
def test_a_table_of_labels_that_cannot_be_learned(
    place: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    table: str,
    flags: tuple[str, ...],
    problem: str,
) -> None:
    source = tmp_path / "x.csv"
    source.write_text(table, encoding="utf-8")
    words = ["prepare", "--task", "classify", "--source", "csv", "--input", str(source)]
    words += ["--tokenizer", str(place / "model"), "--out", str(tmp_path / "out"), *flags]
    require_refusal(capsys, data(words), problem.replace("{csv}", str(source)))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            ("adapter.kind=lora", "adapter.rank=4096"),
            "adapter.rank = 4096 is above the width of the adapted linears, 64. Use 64 or less.",
        ),
        (
            ("adapter.kind=lora", "adapter.target=c_fc"),
            "adapter.target = 'c_fc': the model has no linear 'c_fc'. Use 'all-linear' or some of "
            "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj.",
        ),
        (
            ("adapter.kind=lora", "adapter.target=q_proj,,"),
            "adapter.target = 'q_proj,,': a name is empty. Use 'all-linear' or names of linears "
            "separated by commas, as in 'q_proj,v_proj'.",
        ),
        (
            ("adapter.kind=lora", "model.init=scratch"),
            'defaults: adapter.kind = "lora" needs existing weights, but model.init = "scratch" '
            "starts from random weights. Set model.init to a model.",
        ),
        (
            ("adapter.kind=lora", "engine.compile=true"),
            'defaults: adapter.kind = "lora" does not run with engine.compile = true. Set compile '
            "to false.",
        ),
        (
            ("model.quantize=nf4",),
            'defaults: model.quantize = "nf4": 4-bit weights cannot be trained. Set '
            'adapter.kind = "lora", or model.quantize = "none" for full training.',
        ),
        (
            ("model.quantize=nf4", "adapter.kind=lora", "adapter.dora=true"),
            'defaults: adapter.dora = true does not run with model.quantize = "nf4". Set '
            'adapter.dora to false, or set model.quantize to "none".',
        ),
        (
            ("task.kind=classify",),
            "task.kind = 'classify', but {place}/data was prepared with --task chat. Set "
            "task.kind to 'chat', or prepare other data.",
        ),
        (
            ("data.sequence_length=32",),
            "data.sequence_length = 32, but {place}/data was packed into blocks of 64. Set "
            "sequence_length to 64, or prepare the data again with --sequence-length 32.",
        ),
        (
            ("batch.micro_batch_size=most",),
            "--set batch.micro_batch_size=most: batch.micro_batch_size = 'most': must be a whole "
            'number (or "auto").',
        ),
        (
            ("batch.global_batch_size=7", "batch.micro_batch_size=2"),
            "defaults: batch.global_batch_size = 7 is not a multiple of micro_batch_size = 2. Set "
            "micro_batch_size to a divisor of global_batch_size.",
        ),
        (
            ("model.init={place}/nowhere",),
            "model.init = '{place}/nowhere': the folder does not exist. Correct the path, or "
            "use a run, a checkpoint, a folder in the Hugging Face layout, a GGUF file or a model "
            "on the hub.",
        ),
    ],
)
def test_settings_that_cannot_be(
    place: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    settings: tuple[str, ...],
    sentence: str,
) -> None:
    own = ("task.kind=chat", f"data.dir={place / 'data'}", f"model.init={place / 'model'}")
    given = [each.replace("{place}", str(place)) for each in settings]
    words = ["run", "--inventory", "local", "--runs-dir", str(tmp_path)]
    words += _sets(*own, "data.sequence_length=64", *given)
    require_refusal(capsys, orchestrate(words, os.environ), sentence.replace("{place}", str(place)))
    assert list(tmp_path.iterdir()) == []


def _sets(*settings: str) -> list[str]:
    return [word for each in settings for word in ("--set", each)]


@pytest.fixture(scope="module")
def adapted(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step with an adapter, next to a copy of the model; must not be changed."""
    folder = tmp_path_factory.mktemp("adapted")
    shutil.copytree(place / "model", folder / "base")
    assert _train(folder, place) is None
    return folder


def _train(folder: Path, place: Path, *settings: str) -> TileforgeError | None:
    """Train an adapter on the base in `folder`, in the run next to it, and return the error."""
    forget_accelerate()
    try:
        train_alone(folder / "run", place / "defaults.toml", *_settings(folder, place, *settings))
    except TileforgeError as error:
        return error
    return None


def _settings(folder: Path, place: Path, *settings: str) -> tuple[str, ...]:
    """Return the overrides of a run with an adapter."""
    return (
        *("task.kind=chat", "data.sequence_length=64", "adapter.kind=lora", "adapter.rank=4"),
        *("batch.global_batch_size=2", "batch.micro_batch_size=2", "schedule.warmup_steps=0"),
        *("train.steps=1", "train.eval_every=0", "precision.dtype=fp32"),
        *(f"data.dir={place / 'data'}", f"model.init={folder / 'base'}", *settings),
    )


def _files(folder: Path) -> Mapping[str, bytes]:
    """Return the content of every file below `folder`."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def require_refused_run(error: TileforgeError | None, sentence: str) -> None:
    """Require that a rank ended with this error."""
    assert error is not None and error.exit_code == ExitCode.CONFIG
    assert str(error) == sentence


def test_a_resume_beside_another_base(place: Path, adapted: Path, tmp_path: Path) -> None:
    copy, other = tmp_path / "copy", tmp_path / "other"
    shutil.copytree(adapted, copy)
    make_model(other, "qwen3")
    before = _files(copy / "run" / "checkpoints")
    found, then = weights_sha256(other), weights_sha256(adapted / "base")
    require_refused_run(
        _train(copy, place, "train.steps=2", f"model.init={other}"),
        f"model.init = '{other}': the adapter was trained with other weights (sha256 {then[:12]}, "
        f"now {found[:12]}). Restore the original weights, or start a new run.",
    )
    assert _files(copy / "run" / "checkpoints") == before


def test_a_resume_beside_another_config_json(place: Path, adapted: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(adapted, copy)
    path, then = copy / "base" / "config.json", config_sha256(adapted / "base")
    path.write_text(json.dumps({**json.loads(path.read_text()), "rms_norm_eps": 0.5}))
    before = _files(copy / "run" / "checkpoints")
    require_refused_run(
        _train(copy, place, "train.steps=2"),
        f"model.init = '{copy / 'base'}': the adapter was trained with another config.json (sha256 "
        f"{then[:12]}, now {config_sha256(copy / 'base')[:12]}). Restore the original config.json, "
        "or start a new run.",
    )
    assert _files(copy / "run" / "checkpoints") == before


def test_a_resume_with_another_rank(place: Path, adapted: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(adapted, copy)
    before = _files(copy / "run" / "checkpoints")
    require_refused_run(
        _train(copy, place, "train.steps=2", "adapter.rank=8"),
        "adapter.rank = 8, but the run's checkpoint was trained with 4. Restore the old value, "
        "or start a new run with model.init set to the checkpoint.",
    )
    assert _files(copy / "run" / "checkpoints") == before


@pytest.mark.processes
def test_an_adapter_is_no_base_for_another_adapter(
    place: Path, adapted: Path, tmp_path: Path
) -> None:
    init = adapted / "run"
    own = _settings(tmp_path, place, f"model.init={init}")
    done = run(mpirun(1, *train_program(tmp_path / "run", place / "defaults.toml", *own)))
    assert done.returncode == ExitCode.CONFIG, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1] == (
        f"error: model.init = '{init}': this is an adapter, but adapter.kind = 'lora' needs a "
        "complete model as its base. Merge the adapter first with python -m payload.export "
        f"--model {init} --merge."
    )
    assert not (tmp_path / "run").exists()


def test_a_place_where_an_export_may_not_write(
    adapted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # No user can create a folder there, not even root.
    out = Path("/proc/merged/model")
    words = ["--checkpoint", str(adapted / "run"), "--format", "hf", "--merge", "--out", str(out)]
    require_refusal(
        capsys,
        export(words),
        f"--out {out}: cannot be written (No such file or directory). Choose a writable path.",
    )
    assert not out.exists()


def test_a_kind_of_adapter_that_is_not_lora(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        **{"peft_type": "IA3", "base_model_name_or_path": str(place / "model"), "r": 4},
        **{"lora_alpha": 8, "target_modules": ["q_proj"]},
    }
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    own = ("task.kind=chat", f"data.dir={place / 'data'}", f"model.init={tmp_path / 'adapter'}")
    words = ["run", "--inventory", "local", "--runs-dir", str(tmp_path / "runs")]
    words += _sets(*own, "data.sequence_length=64")
    require_refusal(
        capsys,
        orchestrate(words, os.environ),
        f"{tmp_path}/adapter/adapter_config.json: peft_type = 'IA3', only LORA can be loaded. "
        "Use a folder with a LoRA adapter in PEFT's layout.",
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("x.json", "[]", "--data {file}: no rows. Use a file with data."),
        (
            "x.xlsx",
            "PK\3\4",
            "{file}: a zip file, such as .xlsx or .docx, which is not supported. Save a table as "
            "CSV, or unpack the file. Supported: JSON, JSON Lines, CSV, parquet, Arrow and "
            "plain text.",
        ),
        (
            "x.jsonl",
            '{"a": 1}',
            "--data {file}: no known column found in the columns 'a'. Map the columns to known "
            "names with --columns, such as --columns QUESTION=user,ANSWER=assistant. Or choose "
            "the task with --task, and the columns with --text-column and --label-column.",
        ),
    ],
)
def test_data_that_finetune_does_not_understand(
    place: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    content: str,
    problem: str,
) -> None:
    (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    words = ["--model", str(place / "model"), "--data", str(tmp_path / name), "--dry-run"]
    require_refusal(capsys, finetune(words), problem.replace("{file}", str(tmp_path / name)))
    assert [each.name for each in tmp_path.iterdir()] == [name]
