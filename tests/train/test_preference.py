"""Training on preference pairs: TRL's loss and gradients, exact resume, the reference."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from payload.config.run_config import load_run_config, parse_run_config
from payload.core.dtype import Dtype
from payload.core.errors import CheckpointError, ConfigError, DataError
from payload.data.reading.blocks import BlockOrder
from payload.data.reference_logprobs import ReferenceModel, read_reference, write_reference
from payload.evaluate.__main__ import main as evaluate
from payload.formats.data_folder import load_meta
from payload.kernels.kernels import find_kernels
from payload.models.gpt2.spec import PRESETS
from payload.orchestrate.runs.run_input_checks import tokens_of_data
from payload.run_record.run_files import RunPaths
from payload.train.checkpoints.initial_weights_identity import identify
from payload.train.models.base import CausalLM
from payload.train.models.loading import load
from payload.train.reference.__main__ import main as reference
from payload.train.tasks import preference
from payload.train.tasks.evaluate import EvalPass
from payload.train.tasks.preference import Preference, reference_model
from payload.train.tasks.registry import open_task
from tests.support.chat_data import PLAIN_TEMPLATE, make_model, prepare, write_rows
from tests.support.launching import losses, metrics
from tests.support.preference_data import pairs
from tests.train.alone import ALONE, train_alone
from tests.train.task_runs import (
    BATCH,
    BETA,
    LORA,
    PAIR_LENGTH,
    PAIR_STEPS,
    SEED,
    evaluations,
    preference_config,
)

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("one_thread")]

FASTER = ("optimizer.lr=0.01", "optimizer.min_lr=0.01")
FAST_LORA = (*LORA, *FASTER)
ROWS = pairs(60)
ENDS_AT_STOP = (
    "{% for message in messages %}"
    "{{ '' if loop.first else '\n' }}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '\n<|im_start|>assistant\n' }}{% endif %}"
)
"""PLAIN_TEMPLATE without the line end behind the last stop token, which TRL would train."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), template=PLAIN_TEMPLATE)


@pytest.fixture
def config(model: Path, tmp_path: Path) -> Path:
    """Return the config of a run on pairs, without a stored reference."""
    return preference_config(tmp_path, model, ROWS)


def eval_pass(size: int = BATCH) -> EvalPass:
    return EvalPass(
        world=ALONE,
        step=0,
        micro_batch_size=size,
        max_tokens=None,
        autocast=lambda: torch.autocast("cpu", enabled=False),
        should_stop=lambda _done, _of: False,
    )


def begun(config: Path, base: Path) -> Preference:
    """Return the task of a run with its reference, the base's log-probabilities."""
    task, module = open_task(load_run_config(config)), load(base)
    assert isinstance(task, Preference)
    task.set_base(identify(str(base), base, quantize="none"), resumes=False)
    assert task.begin(module, eval_pass(), dtype="fp32", resumes=False)
    return task


def visited(config: Path) -> list[list[dict[str, Any]]]:
    """Return the rows of each of a run's batches."""
    meta = load_meta(config.with_name("data"))
    order = np.random.default_rng(meta.split.seed).permutation(len(ROWS))
    held_out = set(order[: meta.val_documents].tolist())
    kept = [row for number, row in enumerate(ROWS) if number not in held_out]
    order = BlockOrder(num_blocks=len(kept), seed=SEED).blocks(np.arange(PAIR_STEPS * BATCH))
    return [[kept[place] for place in some] for some in order.reshape(-1, BATCH)]


def trl_trainer(model: Path, rows: list[dict[str, Any]], folder: Path) -> Any:
    """Return TRL's trainer with its own reference log-probabilities of the rows."""
    from datasets import Dataset
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer

    def said(role: str, content: str) -> list[dict[str, str]]:
        return [{"role": role, "content": content}]

    messages = [
        {
            "prompt": said("user", row["prompt"]),
            "chosen": said("assistant", row["chosen"]),
            "rejected": said("assistant", row["rejected"]),
        }
        for row in rows
    ]
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert tokenizer.chat_template == PLAIN_TEMPLATE
    tokenizer.chat_template = ENDS_AT_STOP
    settings = DPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=BATCH,
        max_steps=PAIR_STEPS,
        max_length=PAIR_LENGTH,
        beta=BETA,
        precompute_ref_log_probs=True,
        train_sampling_strategy="sequential",
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        adam_beta2=0.999,
        max_grad_norm=0.0,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        logging_steps=1,
        logging_first_step=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    return DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        args=settings,
        train_dataset=Dataset.from_list(messages),
        processing_class=tokenizer,
    )


@pytest.mark.slow
def test_twenty_losses_are_those_of_trl(model: Path, config: Path, tmp_path: Path) -> None:
    train_alone(tmp_path / "run", config)
    rows = [row for batch in visited(config) for row in batch]
    trainer = trl_trainer(model, rows, tmp_path / "trl")
    trainer.train()
    logged = [row for row in trainer.state.log_history if "loss" in row]
    found = [row for row in metrics(tmp_path / "run") if "loss" in row]
    assert len(found) == PAIR_STEPS and found[0]["loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert found[-1]["loss"] < 0.65
    for ours, theirs in (
        ("loss", "loss"),
        ("reward_margin", "rewards/margins"),
        ("reward_accuracy", "rewards/accuracies"),
    ):
        # The first margins are only rounding errors around 0.
        kept = slice(1 if ours == "reward_accuracy" else 0, None)
        wanted = [row[theirs] for row in logged][kept]
        assert [row[ours] for row in found][kept] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize(
    "case", ["llama", "gpt2", pytest.param("stablelm", marks=pytest.mark.slow)]
)
def test_loss_and_gradients_of_several_batches_are_those_of_trl(tmp_path: Path, case: str) -> None:
    """With weights that differ from the reference, in every family, with and without kernels."""
    base = make_model(tmp_path / "base", case, template=PLAIN_TEMPLATE)
    config = preference_config(tmp_path, base, ROWS)
    batches = visited(config)
    trainer = trl_trainer(base, [row for batch in batches for row in batch], tmp_path / "trl")
    moved(trainer.model).save_pretrained(tmp_path / "moved")
    # TRL's trainer wrote a padding token into the config; its embedding has no gradient.
    shutil.copy(base / "config.json", tmp_path / "moved")
    plain, fast = load(tmp_path / "moved"), load(tmp_path / "moved")
    fast.kernels = find_kernels()
    task = begun(config, base)
    order = BlockOrder(num_blocks=task.train.num_samples(), seed=SEED)
    chosen = order.blocks(np.arange(PAIR_STEPS * BATCH)).reshape(-1, BATCH)
    shaped = load(tmp_path / "moved")
    furthest, several = 0.0, 6
    for some, inputs in islice(zip(chosen, trainer.get_train_dataloader(), strict=True), several):
        trainer.model.zero_grad()
        wanted = trainer.compute_loss(trainer.model, inputs)
        wanted.backward()
        furthest = max(furthest, abs(float(wanted.detach()) - np.log(2)))
        named = dict(trainer.model.named_parameters())
        for ours in (plain, fast):
            loss = task.adapt_model(ours, seed=0, init="x")(*task.train.batch(some).inputs)
            loss.backward()
            assert float(loss.detach()) == pytest.approx(float(wanted.detach()), abs=1e-5)
            found = gradients(ours, shaped)
            assert set(named) <= set(found) and len(named) > 5
            for name, parameter in named.items():
                assert torch.allclose(found[name], parameter.grad, atol=1e-5, rtol=0), name
    assert furthest > 0.05


def gradients(module: CausalLM, shaped: CausalLM) -> dict[str, torch.Tensor]:
    """Return the gradients under transformers' names, in the weights' layout, and reset them.

    `shaped` is another model of the same shape, whose weights are replaced.
    """
    for place, parameter in zip(shaped.parameters(), module.parameters(), strict=True):
        assert parameter.grad is not None
        place.data = parameter.grad
    module.zero_grad()
    return shaped.hf_tensors()


def moved(module: Any) -> Any:
    """Return the model with changed weights, in place."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=draw))
    return module


def own_copy(config: Path, folder: Path) -> str:
    """Return the override that makes a run use a copy of the data, without a reference."""
    out = folder / "own"
    shutil.copytree(config.with_name("data"), out, ignore=shutil.ignore_patterns("reference*"))
    return f"data.dir={out}"


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [(), FAST_LORA], ids=["full", "lora"])
def test_a_resumed_run_is_bitwise_the_unbroken_one(
    config: Path, tmp_path: Path, adapter: tuple[str, ...]
) -> None:
    whole, parts = RunPaths(tmp_path / "whole"), RunPaths(tmp_path / "parts")
    settings = (*FASTER, *adapter, "train.checkpoint_every=5")
    train_alone(whole.root, config, *settings, "train.steps=10")
    train_alone(parts.root, config, *settings, "train.steps=5")
    train_alone(parts.root, config, *settings, "train.steps=10")
    assert losses(parts.root) == losses(whole.root)
    assert losses(whole.root)[0] == pytest.approx(np.log(2), abs=1e-5)
    assert losses(whole.root)[-1] < 0.66
    name = "adapter_model.safetensors" if adapter else "model.safetensors"
    found, wanted = ((each.checkpoint(10) / name).read_bytes() for each in (parts, whole))
    assert found == wanted
    last = evaluations(whole.root)[-1]
    assert last["val_pairs"] == 12 and last["val_accuracy"] > 0.5 and last["val_margin"] > 0


@pytest.mark.parametrize("quantize", ["none", pytest.param("nf4", marks=pytest.mark.slow)])
def test_the_command_stores_what_a_run_computes_itself(
    config: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], quantize: str
) -> None:
    own = own_copy(config, tmp_path).partition("=")[2]
    words = ["--model", str(model), "--data", own, "--dtype", "fp32", "--quantize", quantize]
    assert reference(words, {}) == 0
    assert (
        f"stored the reference log-probabilities of 60 pairs ({model}, fp32)"
        in capsys.readouterr().out
    )
    train_alone(tmp_path / "run", config, "train.steps=1", *FAST_LORA, f"model.quantize={quantize}")
    values = [
        np.frombuffer((folder / "reference.fp32.bin").read_bytes())
        for folder in (Path(own), config.with_name("data"))
    ]
    assert len(values[0]) == 120 and np.allclose(values[0], values[1], atol=1e-4)


def test_a_reference_of_another_model_is_refused_with_the_command_that_replaces_it(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = config.with_name("data")
    train_alone(tmp_path / "first", config, "train.steps=1")
    other = make_model(tmp_path / "other", "qwen3", template=PLAIN_TEMPLATE)
    with pytest.raises(CheckpointError, match=r"but the run starts from .*other") as refused:
        train_alone(tmp_path / "run", config, f"model.init={other}")
    assert not (tmp_path / "run").exists() and "\n" not in str(refused.value)
    words = str(refused.value).partition("payload.train.reference ")[2].split()
    assert words == ["--model", str(other), "--data", str(data)]
    assert reference([*words, "--dtype", "fp32"], {}) == 0
    train_alone(tmp_path / "run", config, f"model.init={other}", "train.steps=1")
    # The run that started with the first model cannot resume with another reference.
    with pytest.raises(CheckpointError, match="the stored reference log-probabilities are from"):
        train_alone(tmp_path / "first", config, "train.steps=2")


def test_a_plan_counts_the_tokens_that_training_counts(config: Path) -> None:
    run = load_run_config(config)
    expected = open_task(run).mean_tokens() * run.batch.global_batch_size
    assert tokens_of_data(run) == round(expected) < run.tokens_per_step()


@pytest.mark.parametrize("when", ["before it is read", "while its own is computed"])
def test_the_reference_of_a_run_that_started_at_the_same_time_is_refused(
    when: str, config: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = Path(load_run_config(config).data.dir)
    task = open_task(load_run_config(config))
    assert isinstance(task, Preference)
    base = identify(str(model), model, quantize="none")
    task.set_base(base, resumes=False)
    other = replace(reference_model(base), sha256="0" * 64)
    zeros = np.zeros((len(ROWS), 2))

    def store(*_: object) -> torch.Tensor:
        write_reference(data, task.meta, model=other, dtype="fp32", values=zeros)
        return torch.zeros(len(ROWS), 2, dtype=torch.float64)

    if when == "before it is read":
        store()
    monkeypatch.setattr(preference, "reference_log_probs", store)
    with pytest.raises(CheckpointError, match=r"Give each run a copy of the folder, or replace"):
        task.begin(load(model), eval_pass(), dtype="fp32", resumes=False)
    found = read_reference(data, task.meta)
    assert found is not None and found.model == other


def test_a_reference_notices_another_config_json_beside_the_same_weights(
    config: Path, model: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    mine = f"model.init={copy}"
    train_alone(tmp_path / "first", config, mine, "train.steps=1")
    written = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**written, "transformers_version": "6.0.0"}))
    train_alone(tmp_path / "second", config, mine, "train.steps=1")
    (copy / "config.json").write_text(json.dumps({**written, "rms_norm_eps": 0.01}))
    with pytest.raises(CheckpointError, match=r"config\.json [0-9a-f]{12}\), but the run starts"):
        train_alone(tmp_path / "third", config, mine, "train.steps=1")


def test_values_of_a_record_without_a_config_hash_are_not_kept_under_one_with_it(
    config: Path, model: Path
) -> None:
    data = Path(load_run_config(config).data.dir)
    meta, base = load_meta(data), reference_model(identify(str(model), model, quantize="none"))
    values = np.zeros((meta.train_documents + meta.val_documents, 2))
    cases: list[tuple[ReferenceModel, Dtype, set[str]]] = [
        (replace(base, config_sha256=None), "bf16", {"reference.bf16.bin"}),
        (base, "fp32", {"reference.fp32.bin"}),
        (base, "bf16", {"reference.fp32.bin", "reference.bf16.bin"}),
    ]
    for record, dtype, files in cases:
        write_reference(data, meta, model=record, dtype=dtype, values=values)
        found = read_reference(data, meta)
        assert found is not None and set(found.files) == files


def test_a_resume_without_its_reference_is_refused(config: Path, tmp_path: Path) -> None:
    data = config.with_name("data")
    train_alone(tmp_path / "run", config, "train.steps=2")
    shutil.copytree(data, tmp_path / "kept")
    (data / "reference.json").unlink()
    with pytest.raises(CheckpointError, match=r"log-probabilities of the run are missing.*--model"):
        train_alone(tmp_path / "run", config, "train.steps=3")
    # The file of a truncated value differs in size.
    shutil.copy(tmp_path / "kept" / "reference.json", data)
    values = data / "reference.fp32.bin"
    values.write_bytes(values.read_bytes()[:-8] + bytes(8))
    with pytest.raises(DataError, match=r"its SHA-256 differs from the one in reference\.json"):
        train_alone(tmp_path / "run", config, "train.steps=3")
    values.write_bytes((tmp_path / "kept" / values.name).read_bytes() + bytes(16))
    record = json.loads((data / "reference.json").read_text())
    record["files"][values.name]["sha256"] = hashlib.sha256(values.read_bytes()).hexdigest()
    (data / "reference.json").write_text(json.dumps(record))
    with pytest.raises(DataError, match=r"has [\d,]+ bytes, but \d+ pairs need"):
        train_alone(tmp_path / "run", config, "train.steps=3")


def test_a_reference_of_data_that_was_prepared_again_is_computed_again(
    config: Path, model: Path, tmp_path: Path
) -> None:
    data = config.with_name("data")
    train_alone(tmp_path / "run", config, "train.steps=1")
    source = write_rows(tmp_path / "other.jsonl", pairs(40, seed=9))
    prepare(
        model,
        source,
        data,
        "--sequence-length",
        PAIR_LENGTH,
        "--val-fraction",
        0.2,
        "--force",
        task="preference",
    )
    assert read_reference(data, load_meta(data)) is None
    train_alone(tmp_path / "again", config, "train.steps=1")
    assert losses(tmp_path / "again")[0] == pytest.approx(np.log(2), abs=1e-5)


def test_bf16_and_fp32_have_a_reference_each(config: Path, model: Path, tmp_path: Path) -> None:
    data = config.with_name("data")
    assert reference(["--model", str(model), "--data", str(data)], {}) == 0
    train_alone(tmp_path / "run", config, "train.steps=1")
    assert losses(tmp_path / "run")[0] == pytest.approx(np.log(2), abs=1e-5)
    found = read_reference(data, load_meta(data))
    assert found is not None and set(found.files) == {"reference.bf16.bin", "reference.fp32.bin"}


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (("task.kind=chat",), r"was prepared with --task preference"),
        (("data.sequence_length=32",), r"was prepared for conversations of 64"),
        (("model.init=scratch",), r'model\.init = "scratch" starts from random weights'),
        (("task.beta=0",), r"task\.beta"),
        (("task.beta=-1",), r"task\.beta"),
        (("task.beta=soft",), r"task\.beta"),
    ],
)
def test_settings_that_do_not_suit_the_data_are_refused(
    config: Path, tmp_path: Path, overrides: tuple[str, ...], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem) as refused:
        train_alone(tmp_path / "run", config, *overrides)
    assert "\n" not in str(refused.value) and not (tmp_path / "run").exists()


def test_evaluate_without_a_reference_names_the_command(
    config: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--checkpoint", str(model), "--data", str(config.with_name("data"))]
    assert evaluate(words, {}) == 10
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: ") and "payload.train.reference --model MODEL" in said


def test_a_plan_counts_two_sequences_a_pair() -> None:
    base = "[model]\ninit = 'x'\n[task]\nkind = "
    pair, chat = (
        parse_run_config(base + each, where="test") for each in ("'preference'", "'chat'")
    )
    assert pair.tokens_per_step() == 2 * chat.tokens_per_step()
    of = [each.rank_setting(dtype="bf16", world_size=1) for each in (pair, chat)]
    assert of[0].micro_batch_size == 2 * of[1].micro_batch_size
    memory = [
        each.memory_bytes(PRESETS["gpt2"], dtype="bf16", world_size=1) for each in (pair, chat)
    ]
    assert memory[0] > memory[1]
