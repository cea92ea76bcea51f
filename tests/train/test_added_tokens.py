"""Runs on data with new special tokens: all weights and adapters, resume, export, plan."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.architecture_cases import CASES, make_folder
from payload.config.run_config import parse_run_config
from payload.core.errors import CheckpointError, ConfigError, ExitCode
from payload.data.__main__ import main as data_main
from payload.data.tokenizer_match import require_same_tokens
from payload.data.tokenizers.probe import probe_texts
from payload.evaluate.__main__ import main as evaluate
from payload.export.__main__ import main as export
from payload.formats.data_folder import load_meta
from payload.formats.tokenizer_identity import folder_identity
from payload.orchestrate.runs.run_input_checks import initial_spec, settle_initial
from payload.train.models.loading import load
from payload.train.models.lora import add_adapter
from tests.model_classes.cases import CASES as CLASSES
from tests.support.accelerate_state import forget_accelerate
from tests.support.chat_data import (
    conversations,
    make_tokenizer,
    prepare,
    prepare_words,
    write_rows,
)
from tests.support.launching import losses, train_several
from tests.support.slow_imports import peft
from tests.train.alone import train_alone
from tests.train.task_runs import LORA

pytestmark = [pytest.mark.usefixtures("one_thread", "own_bases"), pytest.mark.processes]

NEW = ("<|user|>", "<|bot|>")
TEMPLATE = (
    "{% for message in messages %}"
    "{{ ('<|user|>' if message['role'] == 'user' else '<|bot|>') + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|im_end|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|bot|>' }}{% endif %}"
)
CHAT = ("task.kind=chat", "precision.dtype=fp32", "data.sequence_length=32", "train.eval_every=0")
FROZEN = ("optimizer.lr=1e-9", "optimizer.min_lr=0")
SIZES = ("model.n_layer=none", "model.n_head=none", "model.n_embd=none")


def base_of(folder: Path, *, case: str = "llama", free: int = 0) -> Path:
    """Write a model whose embedding has `free` more rows than its tokenizer has tokens."""
    base = make_tokenizer(folder / "base")
    size = len(AutoTokenizer.from_pretrained(base))
    make_folder({**CASES[case], "vocab_size": size + free, "pad_token_id": None}, base)
    return base


def data_of(base: Path, folder: Path, *flags: str) -> Path:
    rows = [{"messages": each} for each in conversations(24)]
    source = write_rows(folder / "rows.jsonl", rows)
    (folder / "chat.jinja").write_text(TEMPLATE)
    words = ("--chat-template", folder / "chat.jinja", "--sequence-length", 32)
    return prepare(base, source, folder / "data", *words, "--add-special-tokens", *NEW, *flags)


def run(folder: Path, config: Path, base: Path, data: Path, *more: str) -> Path:
    """Train to step 4 and return the last checkpoint."""
    settings = (*CHAT, *SIZES, f"model.init={base}", f"data.dir={data}", *more)
    train_alone(folder, config, "schedule.kind=constant", "train.steps=4", *settings)
    return folder / "checkpoints" / "step_00000004"


@pytest.mark.slow
@pytest.mark.parametrize("case", ["llama", "gpt_neox"])
@pytest.mark.parametrize("adapter", [(), LORA], ids=["all weights", "adapter"])
def test_a_run_with_new_tokens_resumes_bitwise_and_its_checkpoint_is_whole(
    case: str,
    adapter: tuple[str, ...],
    tmp_path: Path,
    tiny_config: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.INFO)
    base = base_of(tmp_path, case=case)
    data = data_of(base, tmp_path)
    meta = load_meta(data)
    size = meta.vocab_size
    assert meta.added_tokens is not None and meta.added_tokens.tokens == list(NEW)
    steady = (*adapter, "train.checkpoint_every=2")
    whole = run(tmp_path / "whole", tiny_config, base, data, *steady)
    wanted = f"2 new special tokens, ids {size - 2} to {size - 1}: 2 rows added to {size - 2:,}"
    assert any(wanted in message for message in caplog.messages)
    parts = tmp_path / "parts"
    run(parts, tiny_config, base, data, *steady, "train.steps=2")
    resumed = run(parts, tiny_config, base, data, *steady)
    assert losses(parts) == losses(tmp_path / "whole")
    for name in (f"{'adapter_' if adapter else ''}model.safetensors", "optimizer.safetensors"):
        assert (whole / name).read_bytes() == (resumed / name).read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(whole)
    assert tokenizer.convert_tokens_to_ids(list(NEW)) == [size - 2, size - 1]
    assert folder_identity(whole) == folder_identity(data)
    tokens = torch.tensor([[size - 2, 9, 40, size - 1, 7]])
    ours = load(whole).eval()
    logits = ours.logits(ours.hidden(tokens)).detach()
    if adapter:
        model = AutoModelForCausalLM.from_pretrained(base)
        model.resize_token_embeddings(len(tokenizer))
        theirs: Any = peft().PeftModel.from_pretrained(model, whole)
        out = tmp_path / "merged"
        words = ["--checkpoint", str(whole), "--merge", "--dtype", "fp32", "--out", str(out)]
        assert export(words) == ExitCode.OK
    else:
        theirs, out = AutoModelForCausalLM.from_pretrained(whole), whole
    torch.testing.assert_close(theirs.eval()(tokens).logits, logits, rtol=1e-4, atol=1e-5)
    found = AutoModelForCausalLM.from_pretrained(out).eval()
    assert found.config.vocab_size == size
    torch.testing.assert_close(found(tokens).logits, logits, rtol=1e-4, atol=1e-5)
    capsys.readouterr()
    values = []
    for each in (whole, out):
        assert evaluate(["--checkpoint", str(each), "--data", str(data), "--json"], {}) == 0
        values.append(json.loads(capsys.readouterr().out)["val_loss"])
    assert values[0] == pytest.approx(values[1], rel=1e-5)


MESHES = {
    "shard": ("distributed.strategy=shard",),
    "tensor": ("distributed.tensor_parallel=2",),
    "pipeline": ("distributed.pipeline_parallel=2",),
}


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("case", ["llama, untied, biases", "gpt2"])
def test_ranks_that_read_their_own_parts_get_the_same_new_rows(
    case: str, tmp_path: Path, tiny_config: Path
) -> None:
    base = base_of(tmp_path, case=case)
    data = data_of(base, tmp_path)
    one = run(tmp_path / "one", tiny_config, base, data, *FROZEN)
    forget_accelerate()
    settings = (
        *("schedule.kind=constant", "train.steps=4"),
        *(*CHAT, *SIZES, f"model.init={base}", f"data.dir={data}", *FROZEN),
    )
    runs = {tmp_path / name: (*settings, *more) for name, more in MESHES.items()}
    logs = train_several(runs, tiny_config, num_ranks=2)
    assert "each rank reads its own part" in str(logs)
    wanted = load_file(one / "model.safetensors")
    for each in runs:
        found = load_file(each / "checkpoints" / "step_00000004" / "model.safetensors")
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


def test_an_adapter_of_new_tokens_is_exported_as_gguf(tmp_path: Path, tiny_config: Path) -> None:
    base = base_of(tmp_path)
    data = data_of(base, tmp_path)
    checkpoint = run(tmp_path / "run", tiny_config, base, data, *LORA)
    out = tmp_path / "merged.gguf"
    words = ["--merge", "--format", "gguf", "--dtype", "fp32", "--out", str(out)]
    assert export(["--checkpoint", str(checkpoint), *words]) == ExitCode.OK
    read = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="merged.gguf", dtype=torch.float32
    )
    assert read.config.vocab_size == load_meta(data).vocab_size


def test_free_rows_of_a_padded_vocabulary_are_used_first(
    tmp_path: Path, tiny_config: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    base = base_of(tmp_path, free=3)
    data = data_of(base, tmp_path)
    size = load_meta(data).vocab_size
    checkpoint = run(tmp_path / "run", tiny_config, base, data, *FROZEN)
    assert any("0 rows added to" in each and "2 rows were free" in each for each in caplog.messages)
    name = "model.embed_tokens.weight"
    before, after = (load_file(each / "model.safetensors")[name] for each in (base, checkpoint))
    assert len(after) == len(before) == size + 1
    mean = before[: size - 2].mean(0).expand(2, -1)
    torch.testing.assert_close(after[size - 2 : size], mean, rtol=1e-3, atol=1e-5)


def test_a_run_that_starts_from_a_checkpoint_with_the_tokens_keeps_their_rows(
    tmp_path: Path, tiny_config: Path
) -> None:
    base = base_of(tmp_path)
    data = data_of(base, tmp_path)
    first = run(tmp_path / "first", tiny_config, base, data)
    second = run(tmp_path / "second", tiny_config, first, data, *FROZEN)
    name = "model.embed_tokens.weight"
    rows = [load_file(each / "model.safetensors")[name][-2:] for each in (first, second)]
    torch.testing.assert_close(rows[0], rows[1], rtol=1e-3, atol=1e-6)
    # Preparing again with the checkpoint adds nothing: it has the tokens already.
    (tmp_path / "again").mkdir()
    assert load_meta(data_of(first, tmp_path / "again")).added_tokens is None


def test_the_plan_counts_the_new_rows_and_the_adapters(tmp_path: Path) -> None:
    base = base_of(tmp_path)
    data = data_of(base, tmp_path)
    meta, said, sizes = load_meta(data), list[str](), {}
    size = meta.vocab_size
    for name, more in (("all", ()), ("adapter", LORA)):
        overrides = [*CHAT, *SIZES, f"model.init={base}", f"data.dir={data}", *more]
        config = parse_run_config("", overrides=overrides, where="test")
        config = settle_initial(config, meta=meta, say=said.append, download=False)
        spec, _ = initial_spec(config, vocab_size=size)
        sizes[name] = config.adapted(spec).num_trainable_params()
    assert config.adapter.train_tokens == f"{size - 2},{size - 1}"
    assert sum("2 rows added" in each for each in said) == 2
    model = load(base)
    new = 2 * model.spec.width() * (1 if model.spec.is_tied() else 2)
    assert sizes["all"] == model.spec.num_params() + new
    add_adapter(model, replace(config.adapter, train_tokens="none"), seed=1)
    assert sizes["adapter"] == model.trained_spec().num_trainable_params() + new


def test_another_model_and_a_base_without_rows_are_refused(
    tmp_path: Path, tiny_config: Path
) -> None:
    base = base_of(tmp_path)
    data = data_of(base, tmp_path)
    with pytest.raises(ConfigError, match=r"adapter\.train_tokens = 'none': lacks the new token"):
        run(tmp_path / "none", tiny_config, base, data, *LORA, "adapter.train_tokens=none")
    with pytest.raises(ConfigError, match=r"does not run with distributed\.strategy = \"shard\""):
        run(tmp_path / "shard", tiny_config, base, data, *LORA, "distributed.strategy=shard")
    (tmp_path / "other").mkdir()
    other = base_of(tmp_path / "other")
    raw = json.loads((other / "tokenizer.json").read_text())
    raw["model"]["merges"] = raw["model"]["merges"][:-1]
    (other / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="has another tokenizer"):
        run(tmp_path / "run", tiny_config, other, data)


def test_new_tokens_that_the_packaged_text_contains_do_not_change_the_models_tokenizer(
    tmp_path: Path,
) -> None:
    texts = ("<x>", "[X]", "<x", "xen")
    assert all(any(each in text for text in probe_texts()) for each in texts)
    base = base_of(tmp_path)
    source = write_rows(tmp_path / "rows.jsonl", [{"text": "red <x> blue [X]"}] * 9)
    data = prepare(base, source, tmp_path / "data", "--add-special-tokens", *texts, task="text")
    meta = load_meta(data)
    assert meta.added_tokens is not None and meta.added_tokens.tokens == list(texts)
    require_same_tokens(meta, data=data, folder=base, init=str(base))


def test_a_vocabulary_with_a_table_of_experts_cannot_grow(
    tmp_path: Path, tiny_config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = make_tokenizer(tmp_path / "base")
    size = len(AutoTokenizer.from_pretrained(base))
    raw = {**CLASSES["DeepseekV4"].config(), "vocab_size": size, "pad_token_id": None}
    make_folder(raw, base)
    source = write_rows(tmp_path / "rows.jsonl", [{"text": "red blue"}] * 9)
    words = prepare_words(base, source, tmp_path / "data", task="text")
    assert data_main([*words, "--add-special-tokens", *NEW]) == ExitCode.CONFIG
    said = capsys.readouterr().err
    assert f"{size:,} tokens, cannot grow to {size + 2:,}: " in said
    assert "(tid2eid), which has no row for a new token. Leave out" in said
    # The data can come from another folder with the same tokenizer.
    alone = make_tokenizer(tmp_path / "alone")
    data = prepare(alone, source, tmp_path / "data", "--add-special-tokens", *NEW, task="text")
    with pytest.raises(CheckpointError, match=rf"of {size:,} tokens cannot grow to the {size + 2}"):
        run(tmp_path / "run", tiny_config, base, data, "task.kind=text")
    with pytest.raises(CheckpointError, match=rf"{size:,} tokens cannot grow to {size + 2}"):
        load(base).add_tokens(size, size + 2)
    # Free rows of a padded vocabulary have entries in the table.
    make_folder({**raw, "vocab_size": size + 2}, base)
    assert data_main([*words, "--force", "--add-special-tokens", *NEW]) == ExitCode.OK
    assert load(base).spec.vocab_size == size + 2


@pytest.mark.parametrize(
    ("texts", "task", "code", "problem"),
    [
        ((" ",), "text", 10, "is empty or has blanks at an end"),
        (("a",), "text", 10, "this text is already an ordinary token"),
        (("<|a|>",), "preference", 2, "is not supported with --task preference"),
    ],
)
def test_tokens_that_cannot_be_added_are_refused(
    texts: tuple[str, ...],
    task: str,
    code: int,
    problem: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    base = base_of(tmp_path)
    source = write_rows(tmp_path / "rows.jsonl", [{"text": "red blue"}] * 9)
    words = prepare_words(base, source, tmp_path / "data", task=task)
    assert data_main([*words, "--add-special-tokens", *texts]) == code
    assert problem in capsys.readouterr().err
