"""A 4-bit base: bitsandbytes' own bits, transformers' losses with PEFT, and exact resume.

In bf16 and in fp32, with the same weights.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    Qwen2Config,
    StableLmConfig,
)

from payload.config.model_checks import require_fit
from payload.config.run_config import parse_run_config
from payload.config.training_sections import AdapterSection, OptimizerSection
from payload.core.dtype import Dtype
from payload.core.errors import CheckpointError, ConfigError
from payload.export.__main__ import main as export
from payload.models.adapter import AdaptedSpec
from payload.models.classifier import ClassifierSpec
from payload.models.llama.hub_sizes import CONFIGS
from payload.models.nf4 import nf4_bytes
from payload.models.registry import spec_of
from payload.models.spec import PROCESS_BYTES, RankSetting
from payload.train.models.loading import load
from payload.train.models.lora import add_adapter, cast_base_to_fp32, save_adapter
from payload.train.models.quantized import QuantizedLinear, dequantize, require_quantizer
from payload.train.optimizers.optimizer import build_optimizers
from payload.train.tensors import bitsandbytes_import
from payload.train.torch_engines import apply_engine
from tests.support.launching import losses, mpirun, run, summary, train_program
from tests.support.sampled import sampled
from tests.support.slow_imports import bitsandbytes, peft
from tests.train.alone import ALONE, train_alone

DTYPES: tuple[Dtype, ...] = ("bf16", "fp32")
SETTINGS = AdapterSection(kind="lora", rank=4, alpha=8)
NF4 = (
    *("model.quantize=nf4", "data.sequence_length=32", "train.eval_tokens=64"),
    *("adapter.kind=lora", "adapter.rank=4", "optimizer.lr=0.01"),
    *("model.n_layer=none", "model.n_head=none", "model.n_embd=none"),
)
SIZES: dict[str, Any] = {
    "vocab_size": 50_257,
    "hidden_size": 64,
    # Whole blocks of 64: otherwise transformers, by bitsandbytes' kernel for AVX-512, can differ.
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def saved(folder: Path, config: Any) -> Path:
    torch.manual_seed(5)
    anything: Any = AutoModelForCausalLM
    anything.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small Llama with the vocabulary of the tests' data."""
    folder = tmp_path_factory.mktemp("llama")
    return saved(folder, LlamaConfig(num_key_value_heads=2, tie_word_embeddings=True, **SIZES))


@pytest.fixture(scope="module")
def other_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small model with transformers' own layers."""
    return saved(
        tmp_path_factory.mktemp("stablelm"), StableLmConfig(num_key_value_heads=2, **SIZES)
    )


@pytest.fixture(scope="module")
def biased_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small Qwen2, whose linears before attention have biases."""
    folder = tmp_path_factory.mktemp("qwen2")
    config = Qwen2Config(num_key_value_heads=2, tie_word_embeddings=True, **SIZES)
    torch.manual_seed(5)
    anything: Any = AutoModelForCausalLM
    model = anything.from_config(config)
    for name, each in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(each, std=0.1)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("size", [(64, 64), (700, 576), (3, 70)])
def test_the_bits_are_those_of_bitsandbytes_own_linear(size: tuple[int, int]) -> None:
    weight = torch.randn(size, generator=torch.Generator().manual_seed(1)).bfloat16()
    ours = QuantizedLinear(nn.Linear(size[1], size[0], bias=False))
    ours.take(weight)
    functions: Any = bitsandbytes().functional
    packed, state = functions.quantize_4bit(weight, compress_statistics=True, quant_type="nf4")
    assert torch.equal(ours.weight, packed)
    assert torch.equal(ours.scales, state.absmax)
    assert torch.equal(ours.dequantized(torch.bfloat16), functions.dequantize_4bit(packed, state))
    assert sum(each.nbytes for each in ours.parameters()) == nf4_bytes(weight.numel())


def test_quantised_linears_take_less_than_a_third_of_bf16_and_the_rest_is_bf16(base: Path) -> None:
    model = load(base, quantize="nf4")
    linears = [each for each in model.modules() if isinstance(each, QuantizedLinear)]
    packed = sum(parameter.nbytes for each in linears for parameter in each.parameters())
    elements = sum(each.in_features * each.out_features for each in linears)
    assert len(linears) == 14 and packed <= 0.32 * 2 * elements
    inside = {id(parameter) for each in linears for parameter in each.parameters()}
    others = [each for each in model.parameters() if id(each) not in inside]
    assert {each.dtype for each in others} == {torch.bfloat16}
    spec = AdaptedSpec.of(model.spec, rank=4, target="all-linear", is_quantized=True)
    assert spec.base_bytes(other_bytes=2) == sum(each.nbytes for each in model.parameters())
    cast_base_to_fp32(model)
    assert spec.base_bytes(other_bytes=4) == sum(each.nbytes for each in model.parameters())


def batches(steps: int) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(3)
    return [torch.randint(50_257, (2, 33), generator=drawn) for _ in range(steps)]


@pytest.mark.parametrize("which", ["base", "other_base"])
def test_losses_are_those_of_transformers_with_bitsandbytes_and_peft(
    which: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder, rate, steps = request.getfixturevalue(which), 5e-3, 10
    model = load(folder, quantize="nf4")
    add_adapter(model, SETTINGS, seed=1)
    save_adapter(model, tmp_path, base=(str(folder), None))
    settings = OptimizerSection(lr=rate, min_lr=rate)
    optimizers = build_optimizers(model, settings)
    config = parse_run_config("", where="nothing")
    apply_engine(model, optimizers, settings=config.engine, world=ALONE)
    optimizers.set_lr(rate)
    ours = []
    for text in batches(steps):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model.train()(text[:, :-1], text[:, 1:])
        loss.backward()
        optimizers.clip(1.0)
        optimizers.step()
        optimizers.zero_grad()
        ours.append(loss.item())
    assert ours == pytest.approx(pefts_losses(folder, tmp_path, settings, steps), abs=1e-3)
    assert ours[0] != ours[-1]


@pytest.mark.parametrize("which", ["base", "other_base", "biased_base"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_in_fp32_the_loss_and_gradients_are_those_of_the_same_weights_in_plain_linears(
    which: str, checkpointing: bool, request: pytest.FixtureRequest
) -> None:
    found: list[tuple[Tensor, ...]] = []
    (text,) = batches(1)
    for is_plain in (False, True):
        model = load(request.getfixturevalue(which), quantize="nf4")
        if is_plain:
            dequantize(model)
        else:
            cast_base_to_fp32(model)
        add_adapter(model, SETTINGS, seed=1)
        if checkpointing and not is_plain:
            model.enable_checkpointing()
        trained = [each for each in model.parameters() if each.requires_grad]
        with torch.no_grad():
            for each in trained:
                each.normal_(std=0.05, generator=torch.Generator().manual_seed(each.numel()))
        loss = model.train()(text[:, :-1], text[:, 1:])
        loss.backward()
        found.append((loss.detach(), *(each.grad for each in trained if each.grad is not None)))
    assert len(found[0]) == len(trained) + 1
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-7)
        assert ours.dtype == torch.float32 and bool(ours.any())


@pytest.mark.parametrize("labels", [None, 3])
def test_memory_is_estimated_for_the_weights_that_the_dtype_holds(labels: int | None) -> None:
    base = spec_of(CONFIGS["Qwen3-4B"], where="test").with_sequence_length(512)
    sizes = [each.inputs * each.outputs for each in base.linears()]
    others, embedding = base.num_params() - sum(sizes), base.embedding_size()
    whole = base if labels is None else ClassifierSpec.of(base, num_labels=labels)
    spec = AdaptedSpec.of(whole, rank=4, target="all-linear", is_quantized=True)
    # Without tokens: only weights.
    none = RankSetting(
        micro_batch_size=0, dtype="bf16", kernels=True, alone=True, accumulates=False
    )
    empty = [spec.memory_bytes(replace(none, dtype=each)) for each in DTYPES]
    assert empty[1] - empty[0] == 2 * others + 4 * max(sizes)
    # The start has no copy of a linear, no adapter, and one weight in both dtypes.
    start = spec.base_bytes(other_bytes=4) + 2 * embedding + PROCESS_BYTES
    assert empty[1] < start == spec.rank_memory_bytes(replace(none, dtype="fp32"))
    # With tokens, the start is over before their memory is allocated.
    one = replace(none, micro_batch_size=1, dtype="fp32")
    assert spec.rank_memory_bytes(one) == spec.memory_bytes(one) > start
    less = spec.checkpointed_memory_bytes(one)
    assert spec.rank_memory_bytes(one, checkpointed=True) == max(less, start)


def pefts_losses(
    folder: Path, adapter: Path, settings: OptimizerSection, steps: int
) -> list[float]:
    anything: Any = AutoModelForCausalLM
    settings_of: Any = BitsAndBytesConfig
    how = settings_of(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    base = anything.from_pretrained(
        folder, quantization_config=how, dtype=torch.bfloat16, device_map="cpu"
    )
    model = peft().PeftModel.from_pretrained(base, adapter, is_trainable=True).train()
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(
        trained,
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        weight_decay=settings.weight_decay,
    )
    found = []
    for text in batches(steps):
        targets = text[:, 1:].contiguous()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=text[:, :-1], labels=targets, shift_labels=targets).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
def test_resume_is_bitwise_and_its_checkpoint_says_how_the_base_was_quantised(
    base: Path, tmp_path: Path, tiny_config: Path, dtype: str
) -> None:
    settings = (f"model.init={base}", *NF4, f"precision.dtype={dtype}", "train.checkpoint_every=2")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train_alone(whole, tiny_config, *settings, "train.steps=4", "schedule.decay_steps=4")
    train_alone(parts, tiny_config, *settings, "train.steps=2", "schedule.decay_steps=4")
    train_alone(parts, tiny_config, *settings, "train.steps=4", "schedule.decay_steps=4")
    assert losses(parts) == losses(whole)
    name = "checkpoints/step_00000004"
    found, wanted = (
        load_file(each / name / "adapter_model.safetensors") for each in (parts, whole)
    )
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    assert '"quantize": "nf4"' in (whole / name / "trainer.json").read_text()
    with pytest.raises(
        CheckpointError, match=r"model\.quantize = .none., but the run's checkpoint"
    ):
        train_alone(parts, tiny_config, *settings, "model.quantize=none", "train.steps=6")
    exported_weights_compute_as_the_run_did(whole / name, base, tmp_path / "merged")


def exported_weights_compute_as_the_run_did(checkpoint: Path, base: Path, out: Path) -> None:
    words = ["--checkpoint", str(checkpoint), "--format", "hf", "--merge", "--dtype", "fp32"]
    assert export([*words, "--out", str(out)]) == 0
    (text,) = batches(1)
    model, merged = load(checkpoint).eval(), load(out).eval()
    plain = load(base).eval()
    with torch.no_grad():
        torch.testing.assert_close(merged.hidden(text), model.hidden(text), rtol=0, atol=1e-6)
        assert not torch.equal(plain.hidden(text), model.hidden(text))


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("dtype", sampled(DTYPES, sample=("bf16",)))
def test_two_ranks_have_one_quantised_base(
    base: Path, tmp_path: Path, tiny_config: Path, dtype: str
) -> None:
    settings = (f"model.init={base}", *NF4, f"precision.dtype={dtype}", "train.steps=2")
    train_alone(tmp_path / "1", tiny_config, *settings)
    words = train_program(tmp_path / "2", tiny_config, "schedule.warmup_steps=0", *settings)
    done = run(mpirun(2, *words))
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "1"), rel=1e-3)
    assert summary(tmp_path / "2")["ranks_identical"] is True


LORA = '[model]\nquantize = "nf4"\ninit = "somewhere"\n[adapter]\nkind = "lora"\n'


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('[model]\nquantize = "nf4"\n', "4-bit weights cannot be trained"),
        (LORA + '[engine]\nkind = "ipex"\n', 'does not run with engine.kind = "ipex"'),
        (LORA + '[distributed]\nstrategy = "shard"\n', "does not run with distributed.strategy"),
        (LORA.replace("nf4", "int4"), "model.quantize = 'int4'"),
    ],
)
def test_settings_that_do_not_go_with_it_are_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        parse_run_config(text, where="run.toml")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("shape", [(6, 32), (8, 96), (5, 64), (3, 130)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_run_across_rows_on_every_cpu(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """bitsandbytes' kernel for AVX-512 takes other scales if a row ends within a block."""
    torch.manual_seed(0)
    outputs, inputs = shape
    linear = QuantizedLinear(nn.Linear(inputs, outputs, bias=False))
    linear.take(torch.randn(shape, dtype=torch.bfloat16))
    library: Any = bitsandbytes().functional
    scales = library.dequantize_blockwise(
        linear.scales,
        absmax=linear.scales_scales,
        code=library.create_dynamic_map(),
        blocksize=256,
    )
    scales = (scales + linear.scales_mean).repeat_interleave(64)[: inputs * outputs]
    halves = torch.stack((linear.weight >> 4, linear.weight & 15), dim=-1).flatten().long()
    values = library.get_4bit_type("nf4", device="cpu")[halves[: inputs * outputs]]
    expected = (values * scales).bfloat16().float().view(shape)
    assert torch.equal(linear.dequantized(torch.float32), expected)
    x = torch.randn(4, inputs, dtype=dtype)
    torch.testing.assert_close(linear(x), x @ expected.to(dtype).t(), atol=0.05, rtol=0.02)


def test_without_bitsandbytes_the_error_says_what_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bitsandbytes_import._imported.cache_clear()
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"needs bitsandbytes .*pip install 'bitsandbytes"):
        require_quantizer()


def test_gpt2_is_refused(base: Path) -> None:
    config = parse_run_config(LORA, where="run.toml")
    gpt2 = config.model.spec(sequence_length=64, vocab_size=None)
    with pytest.raises(CheckpointError, match="cannot be quantised: its weights are stored as"):
        require_fit(gpt2.with_sequence_length(1024), config, vocab_size=None)


def test_a_base_that_is_quantised_already_is_refused(base: Path, tmp_path: Path) -> None:
    anything: Any = AutoModelForCausalLM
    settings_of: Any = BitsAndBytesConfig
    how = settings_of(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = anything.from_pretrained(base, quantization_config=how, device_map="cpu")
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"quant_method = .bitsandbytes.: cannot be deq"):
        load(tmp_path, quantize="nf4")
