"""LoRA: frozen weights do not change, PEFT computes the same, and resume is exact."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig

from payload.config.run_config import parse_run_config
from payload.config.training_sections import AdapterSection
from payload.core.errors import CheckpointError, ConfigError
from payload.export.merge_rounding import MergeRounding
from payload.export.merged import merged_weights
from payload.formats.checkpoint_listing import manifest_problems
from payload.models.gpt2.spec import PRESETS
from payload.models.spec import RankSetting
from payload.train.checkpoints.initial_weights_identity import identify
from payload.train.models.base import trainable
from payload.train.models.hf_weights import save_hf
from payload.train.models.loading import load
from payload.train.models.lora import (
    add_adapter,
    is_plain_linear,
    load_adapter,
    merge_adapter,
    save_adapter,
)
from payload.weights.adapter_files import read_adapter_config
from tests.support.launching import losses, summary
from tests.support.slow_imports import peft
from tests.train.alone import train_alone
from tests.train.test_model import make_model

SETTINGS = AdapterSection(kind="lora", rank=4, alpha=8)
LORA = ("adapter.kind=lora", "adapter.rank=4", "adapter.alpha=8", "optimizer.lr=0.01")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small GPT-2 with the vocabulary of the tests' data."""
    folder = tmp_path_factory.mktemp("base")
    save_hf(make_model(n_embd=32, n_head=2, n_layer=2, vocab_size=50_257), folder)
    return folder


def with_weights(base: Path, *, scale: float = 0.1, **changes: Any) -> Any:
    """Return the base with an adapter that is not zero."""
    model = load(base)
    settings = AdapterSection(kind="lora", rank=4, alpha=8, **changes)
    add_adapter(model, settings, seed=1)
    with torch.no_grad():
        for _, parameter in trainable(model):
            parameter.normal_(std=scale)
    return model


def tokens(seed: int = 0, length: int = 12) -> Tensor:
    return torch.randint(0, 1000, (2, length), generator=torch.Generator().manual_seed(seed))


def test_only_the_adapter_is_trained_and_the_spec_counts_it(base: Path) -> None:
    model = load(base)
    add_adapter(model, SETTINGS, seed=1)
    names = [name for name, _ in trainable(model)]
    assert names and all(name.endswith(("lora_A", "lora_B")) for name in names)
    spec = model.trained_spec()
    count = sum(parameter.numel() for _, parameter in trainable(model))
    assert spec.num_trainable_params() == count
    assert spec.num_params() == sum(each.numel() for each in model.parameters())
    assert sum(each.elements for each in spec.gradient_sizes()) == count


def test_an_adapter_begins_at_the_base(base: Path) -> None:
    plain, adapted = load(base).eval(), load(base)
    add_adapter(adapted, SETTINGS, seed=1)
    assert torch.equal(plain.hidden(tokens()), adapted.eval().hidden(tokens()))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rslora": True},
        {"dora": True},
        {"target": "c_attn,mlp.c_proj"},
        {"target": "transformer.h.0.attn.c_attn,h.1.mlp.c_proj"},
    ],
)
def test_peft_reads_the_adapter_and_gives_equal_logits(
    base: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    model = with_weights(base, **changes).eval()
    save_adapter(model, tmp_path, base=(str(base), None))
    theirs = (
        peft()
        .PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path)
        .eval()
    )
    wanted = theirs(tokens()).logits
    ours = model.logits(model.hidden(tokens()))
    assert (wanted - ours).abs().max() < 1e-5 * wanted.abs().max()
    merged = load(tmp_path).eval()
    assert merged.adapter is None and all(each.requires_grad for each in merged.parameters())
    again = merged.logits(merged.hidden(tokens()))
    assert (wanted - again).abs().max() < 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("target", [["c_attn", "c_fc"], "all-linear"])
def test_an_adapter_that_peft_wrote_is_read(
    target: str | list[str], base: Path, tmp_path: Path
) -> None:
    config = peft().LoraConfig(r=3, lora_alpha=5, target_modules=target, task_type="CAUSAL_LM")
    theirs = peft().get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    theirs.save_pretrained(str(tmp_path))
    if target == "all-linear":
        # PEFT lists full paths, and shortens only lists of 20 names or more.
        written = json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"]
        assert "transformer.h.0.attn.c_attn" in written
    ours = load(tmp_path).eval()
    wanted = theirs(tokens()).logits
    assert (wanted - ours.logits(ours.hidden(tokens()))).abs().max() < 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("changes", [{}, {"rslora": True}, {"dora": True}])
def test_gradients_are_pefts(base: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    model = with_weights(base, **changes)
    save_adapter(model, tmp_path, base=(str(base), None))
    theirs = peft().PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), tmp_path, is_trainable=True
    )
    text = tokens(length=13)
    model(text[:, :-1], text[:, 1:]).backward()
    theirs(text, labels=text).loss.backward()
    wanted = {
        name.replace(".default", "").removesuffix(".weight"): parameter.grad
        for name, parameter in theirs.named_parameters()
        if parameter.grad is not None
    }
    found = {
        f"base_model.model.{model.hf_name(name)}": parameter.grad
        for name, parameter in trainable(model)
    }
    assert set(found) == set(wanted)
    for name, gradient in found.items():
        other = wanted[name]
        assert gradient is not None and other is not None
        assert (gradient - other).norm() <= 1e-5 * other.norm(), name


def test_dora_with_dropout_begins_at_the_base_and_resumes_bitwise(
    base: Path, tmp_path: Path, tiny_config: Path
) -> None:
    text = tokens(length=13)
    losses_at_first = []
    for dora in (False, True):
        model = load(base)
        settings = AdapterSection(kind="lora", rank=4, alpha=8, dora=dora)
        add_adapter(model, settings, seed=1)
        losses_at_first.append(model(text[:, :-1], text[:, 1:]).item())
    assert losses_at_first[1] == pytest.approx(losses_at_first[0], rel=1e-5)
    settings_of = overrides(base, *SIZES, "adapter.dora=true", "adapter.dropout=0.1")
    train_alone(tmp_path / "whole", tiny_config, *settings_of, "train.steps=6")
    for steps in (3, 6):
        train_alone(tmp_path / "parts", tiny_config, *settings_of, f"train.steps={steps}")
    names = ("adapter_model.safetensors", "optimizer.safetensors")
    for name in names:
        whole, parts = (
            load_file(tmp_path / run / "checkpoints" / "step_00000006" / name)
            for run in ("whole", "parts")
        )
        assert all(torch.equal(whole[key], parts[key]) for key in whole), name


def test_export_merges_dora_as_loading_does(base: Path, tmp_path: Path) -> None:
    model = with_weights(base, dora=True)
    save_adapter(model, tmp_path, base=(str(base), None))
    loaded = load(tmp_path).hf_tensors()
    merged = merged_weights(base, tmp_path, rounding=MergeRounding())
    for name in merged.shapes():
        assert torch.allclose(merged.read(name), loaded[name].float(), rtol=1e-5, atol=1e-6)


def test_merging_leaves_the_base_plus_the_adapters_product(base: Path) -> None:
    model = with_weights(base)
    before = model.h[0].attn.c_attn.weight.detach().clone()
    wanted = before + model.h[0].attn.c_attn.delta()
    merge_adapter(model)
    assert torch.equal(model.h[0].attn.c_attn.weight, wanted)
    assert model.spec == load(base).spec


def overrides(base: Path, *more: str) -> tuple[str, ...]:
    return (f"model.init={base}", "model.preset=tiny", "train.eval_tokens=64", *LORA, *more)


SIZES = ("model.n_layer=none", "model.n_head=none", "model.n_embd=none")


def test_a_run_trains_the_adapter_alone_and_saves_it_alone(
    base: Path, tmp_path: Path, tiny_config: Path
) -> None:
    train_alone(tmp_path / "run", tiny_config, *overrides(base, *SIZES), "train.steps=10")
    (folder,) = (tmp_path / "run" / "checkpoints").glob("step_00000010")
    assert not (folder / "model.safetensors").exists() and not manifest_problems(folder)
    found = losses(tmp_path / "run")
    assert found[-1] < found[0]
    assert summary(tmp_path / "run")["status"] == "finished"
    state = json.loads((folder / "trainer.json").read_text())
    assert state["base"]["source"] == str(base) and len(state["base"]["sha256"]) == 64
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)
    names = load_file(folder / "optimizer.safetensors")
    assert names and all("lora_" in name for name in names)


def test_three_steps_and_three_after_a_resume_are_six(
    base: Path, tmp_path: Path, tiny_config: Path
) -> None:
    wanted = overrides(base, *SIZES, "adapter.dropout=0.1", "schedule.kind=constant")
    train_alone(tmp_path / "whole", tiny_config, *wanted, "train.steps=6")
    train_alone(tmp_path / "parts", tiny_config, *wanted, "train.steps=3")
    train_alone(tmp_path / "parts", tiny_config, *wanted, "train.steps=6")
    whole, parts = (
        load_file(tmp_path / name / "checkpoints/step_00000006/adapter_model.safetensors")
        for name in ("whole", "parts")
    )
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_a_merged_model_is_known_by_its_adapters_settings_and_not_by_its_bases_place(
    base: Path, tmp_path: Path
) -> None:
    folder, moved = tmp_path / "adapter", tmp_path / "moved"
    folder.mkdir()
    save_adapter(with_weights(base), folder, base=(str(base), None))
    path = folder / "adapter_config.json"
    saved = json.loads(path.read_text())

    def sha256(**changes: object) -> str:
        path.write_text(json.dumps({**saved, **changes}))
        return identify(str(folder), folder, quantize="none").sha256

    shutil.copytree(base, moved)
    assert sha256(base_model_name_or_path=str(moved)) == sha256()
    assert len({sha256(), sha256(lora_alpha=16.0), sha256(use_rslora=True)}) == 3


def test_a_resume_needs_the_same_base(base: Path, tmp_path: Path, tiny_config: Path) -> None:
    other = tmp_path / "base"
    other.mkdir()
    for path in base.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    wanted = overrides(other, *SIZES)
    train_alone(tmp_path / "run", tiny_config, *wanted, "train.steps=2")
    weights = load_file(other / "model.safetensors")
    weights["transformer.wpe.weight"] += 1
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="the adapter was trained with other weights"):
        train_alone(tmp_path / "run", tiny_config, *wanted, "train.steps=4")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("adapter.target=no_such", "the model has no linear 'no_such'"),
        ("adapter.target=,", "a name is empty"),
        ("adapter.rank=0", "at least 1"),
        ("adapter.rank=1025", "adapter.rank = 1025 is above the width of the adapted linears"),
        ("model.init=scratch", "starts from random weights. Set model.init to a model"),
        (("adapter.dora=true", "distributed.strategy=shard"), "adapter.dora = true does not run"),
        (("adapter.dora=true", "model.quantize=nf4"), "adapter.dora = true does not run"),
        ("engine.compile=true", "does not run with engine.compile = true"),
    ],
)
def test_adapter_settings_that_cannot_be_are_one_line(
    base: Path, tmp_path: Path, tiny_config: Path, change: str | tuple[str, ...], says: str
) -> None:
    changes = (change,) if isinstance(change, str) else change
    with pytest.raises(ConfigError) as error:
        train_alone(tmp_path / "run", tiny_config, *overrides(base, *SIZES), *changes)
    assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("peft_type", "IA3", "only LORA"),
        ("bias", "all", "only none"),
        ("target_modules", ".*", "not a list of names"),
        ("target_modules", ["c_attn", " c_fc"], "not a list of names"),
        ("target_modules", ["c_attn,c_fc"], "not a list of names"),
        ("target_modules", ["all-linear"], "not a list of names"),
        ("modules_to_save", ["lm_head"], "only null"),
        ("modules_to_save", [{}], "must be a string"),
        ("base_model_name_or_path", None, "is missing"),
        ("r", 0, "r"),
        ("alpha_pattern", {"c_attn": 64}, "cannot be loaded"),
        ("rank_pattern", {"c_attn": 2}, "cannot be loaded"),
        ("layers_to_transform", 0, "cannot be loaded"),
        ("lora_bias", True, "cannot be loaded"),
        ("layer_replication", [[0, 1], [0, 2]], "cannot be loaded"),
        ("use_qalora", True, "cannot be loaded"),
        ("a_key_of_tomorrow", 0.5, "cannot be loaded"),
        *(
            ("init_lora_weights", kind, "may have changed the base's weights")
            for kind in ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga")
        ),
    ],
)
def test_another_kind_of_adapter_is_refused_by_its_key(
    base: Path, tmp_path: Path, key: str, value: object, says: str
) -> None:
    save_adapter(with_weights(base), tmp_path, base=(str(base), None))
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(CheckpointError, match=key) as error:
        load(tmp_path)
    assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("begins", [True, False, "gaussian", "eva", "orthogonal"])
def test_every_key_that_peft_writes_passes_with_its_default(
    begins: bool | str, tmp_path: Path
) -> None:
    config = peft().LoraConfig(
        base_model_name_or_path="base",
        target_modules=["q_proj"],
        task_type="CAUSAL_LM",
        init_lora_weights=begins,
    )
    config.save_pretrained(str(tmp_path))
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    assert saved.keys() > {"alpha_pattern", "megatron_core", "qalora_group_size"}
    assert read_adapter_config(tmp_path).settings.rank == config.r


def test_an_adapter_of_another_model_is_refused(base: Path) -> None:
    model = with_weights(base)
    with pytest.raises(CheckpointError, match="does not contain this model's adapter"):
        load_adapter(model, {"base_model.model.x.lora_A.weight": torch.zeros(1)}, where="there")


def test_a_plan_counts_the_adapter_alone() -> None:
    config = parse_run_config(
        "", overrides=["model.init=gpt2", "adapter.kind=lora", "adapter.rank=8"], where="test"
    )
    base = PRESETS["gpt2"]
    adapted = config.adapted(base)
    # 12 layers of c_attn, c_proj, c_fc and c_proj.
    assert adapted.num_trainable_params() == 12 * 8 * 768 * (1 + 3 + 1 + 1 + 1 + 4 + 4 + 1)
    assert adapted.checkpoint_bytes() == adapted.num_trainable_params() * 12
    assert base.flops_per_token() * 0.6 < adapted.flops_per_token() < base.flops_per_token() * 0.75
    memory = [
        spec.memory_bytes(
            RankSetting(
                micro_batch_size=4, dtype="bf16", kernels=False, alone=True, accumulates=False
            )
        )
        for spec in (adapted, base)
    ]
    assert memory[0] < memory[1]


@pytest.mark.parametrize("kind", ["native", "transformers"])
def test_peft_computes_the_same_beside_other_families(tmp_path: Path, kind: str) -> None:
    shape: dict[str, Any] = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48}
    shape |= {"num_hidden_layers": 2, "num_attention_heads": 4}
    anything: Any = AutoModelForCausalLM
    torch.manual_seed(3)
    config = (
        LlamaConfig(**shape, num_key_value_heads=2, max_position_embeddings=64)
        if kind == "native"
        else GPTNeoXConfig(**shape, max_position_embeddings=64)
    )
    anything.from_config(config).save_pretrained(tmp_path / "base")
    model = with_weights(tmp_path / "base").eval()
    save_adapter(model, tmp_path, base=(str(tmp_path / "base"), None))
    theirs = (
        peft()
        .PeftModel.from_pretrained(anything.from_pretrained(tmp_path / "base"), tmp_path)
        .eval()
    )
    text = tokens() % 96
    wanted, ours = theirs(text).logits, model.logits(model.hidden(text))
    assert (wanted - ours).abs().max() < 1e-5 * wanted.abs().max()
    if kind == "native":
        count = sum(parameter.numel() for _, parameter in trainable(model))
        assert model.trained_spec().num_trainable_params() == count


class GroupedLinear(nn.Linear):
    """A linear of DeepSeek V4's kind: it takes groups of inputs."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.view(-1, 2, self.in_features)


def test_a_linear_that_reshapes_its_input_is_not_plain() -> None:
    assert is_plain_linear(nn.Linear(4, 4))
    assert not is_plain_linear(GroupedLinear(4, 4))
