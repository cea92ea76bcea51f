"""Routers of mixtures: their balancing loss is transformers', they can be frozen, and idle experts
are counted."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from benchmarks.architecture_cases import make_folder, random_tokens
from payload.core.errors import ConfigError
from payload.core.file_hash import sha256_of
from payload.formats.data_folder import IGNORED_TARGET
from payload.run_record.metrics_log import StepMetrics, to_json_line
from payload.train.models.base import CausalLM, trainable
from payload.train.models.loading import load
from tests.support.accelerate_state import forget_accelerate
from tests.support.data_folders import make_data_folder
from tests.support.launching import TINY_RUN, losses, train_several
from tests.train.alone import train_alone

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.5,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {**SIZES, "num_local_experts": 4},
    "qwen3_moe": {**SIZES, "num_experts": 4, "moe_intermediate_size": 8, "head_dim": 8},
    "olmoe": {**SIZES, "num_experts": 4},
    "granitemoe": {**SIZES, "num_local_experts": 4, "logits_scaling": 2.0},
    "gpt_oss": {
        **{**SIZES, "num_local_experts": 4, "head_dim": 8, "layer_types": ["full_attention"] * 2},
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    },
}


def made(name: str, folder: Path, **changes: Any) -> Any:
    """Return transformers' module, also saved in `folder`."""
    return make_folder({"model_type": name, **MIXTURES[name], **changes}, folder)


@pytest.mark.parametrize("name", MIXTURES)
def test_the_loss_and_its_gradients_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    made(name, tmp_path)
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path).train()
    ours = load(tmp_path).train()
    tokens, _ = random_tokens(97)
    wanted = theirs(input_ids=tokens, labels=tokens)
    assert wanted.aux_loss > 0
    loss = ours(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    # The last token has no target, so transformers' router reads one token more of each row.
    short = theirs(input_ids=tokens[:, :-1]).aux_loss - wanted.aux_loss
    torch.testing.assert_close(loss, wanted.loss + 0.5 * short, rtol=1e-6, atol=1e-6)
    assert ours.router_loss() is None
    torch.autograd.backward(loss)
    torch.autograd.backward(wanted.loss + 0.5 * short)
    found = {name.removeprefix("module."): each for name, each in ours.named_parameters()}
    for key, each in theirs.named_parameters():
        torch.testing.assert_close(found[key].grad, each.grad, rtol=1e-4, atol=1e-6, msg=key)
    assert "times router_aux_loss_coef = 0.5" in " ".join(ours.speed_notes())


@pytest.mark.parametrize("name", MIXTURES)
def test_padding_is_left_out_of_the_balancing_loss_as_by_transformers(
    name: str, tmp_path: Path
) -> None:
    made(name, tmp_path)
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path).train()
    ours = load(tmp_path).train()
    tokens, _ = random_tokens(97)
    places = torch.arange(tokens.shape[1]).expand_as(tokens)
    ends = torch.tensor([tokens.shape[1], *[5 + row for row in range(1, len(tokens))]])
    padding = places >= ends[:, None]
    assert bool(padding.any()) and not bool(padding.all(1).any())
    labels = tokens.masked_fill(padding, IGNORED_TARGET)
    wanted = theirs(input_ids=tokens, attention_mask=(~padding).long(), labels=labels)
    targets = torch.full_like(labels, IGNORED_TARGET)
    targets[:, :-1] = labels[:, 1:]
    # As the readers of conversations and pairs give them: each padding token is a document.
    starts = torch.where(padding, places, 0)
    loss = ours(tokens, targets, starts)
    torch.testing.assert_close(loss, wanted.loss, rtol=1e-6, atol=1e-6)
    unmasked = theirs(input_ids=tokens).aux_loss
    assert abs(float(unmasked - wanted.aux_loss)) > 1e-4


@pytest.mark.parametrize(
    "changes", [{"output_router_logits": False}, {"router_aux_loss_coef": 0.0}]
)
def test_without_the_config_s_request_there_is_no_balancing_loss(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    made("mixtral", tmp_path, **changes)
    tokens, targets = random_tokens(97)
    ours = load(tmp_path)
    torch.testing.assert_close(
        ours(tokens, targets), ours.token_losses(tokens, targets).mean(), rtol=1e-6, atol=1e-6
    )
    assert "balancing" not in " ".join(ours.speed_notes())


def routers(model: CausalLM) -> list[nn.Parameter]:
    return [
        each for name, each in model.named_parameters() if ".gate." in name or ".router." in name
    ]


@pytest.mark.parametrize("name", MIXTURES)
def test_frozen_routers_are_the_only_frozen_parameters(name: str, tmp_path: Path) -> None:
    made(name, tmp_path)
    model = load(tmp_path)
    assert all(each.requires_grad for each in model.parameters())
    model.freeze_router()
    assert routers(model) and not any(each.requires_grad for each in routers(model))
    total = sum(1 for _ in model.parameters())
    assert sum(1 for _ in trainable(model)) == total - len(routers(model))


def test_a_model_without_routers_cannot_freeze_them(tmp_path: Path) -> None:
    raw = {**SIZES, "model_type": "stablelm"}
    make_folder(raw, tmp_path)
    with pytest.raises(ConfigError, match=r'model\.router = "freeze": .*has no router'):
        load(tmp_path).freeze_router()


@pytest.mark.parametrize("name", MIXTURES)
def test_the_tokens_of_each_expert_are_counted_in_training_alone(name: str, tmp_path: Path) -> None:
    made(name, tmp_path)
    model = load(tmp_path).train()
    tokens, targets = random_tokens(97)
    with torch.no_grad():
        model(tokens, targets)
    assert model.take_expert_tokens().sum() == 0
    model(tokens, targets)
    counts = model.take_expert_tokens()
    assert len(counts) == 2 * 4
    # Each token goes to two experts in each of two layers.
    assert counts.sum() == tokens.numel() * 2 * 2
    assert model.take_expert_tokens().sum() == 0


def test_a_row_has_idle_experts_of_a_mixture_alone() -> None:
    def row(idle: int | None) -> str:
        return to_json_line(
            StepMetrics(
                step=1,
                tokens=1,
                loss=1.0,
                lr=1.0,
                grad_norm=1.0,
                tokens_per_s=1.0,
                mfu=None,
                data_time_s=1.0,
                step_time_s=1.0,
                sync_time_s=0.0,
                rss_bytes=1,
                idle_experts=idle,
            )
        )

    assert "idle_experts" not in row(None)
    assert json.loads(row(0))["idle_experts"] == 0


@pytest.fixture(scope="module")
def run_config(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return a config for a small mixture, and a setting of its runs."""
    return config_of("mixtral", tmp_path_factory.mktemp("mixture"), num_local_experts=16)


def config_of(name: str, folder: Path, **changes: Any) -> tuple[Path, str]:
    """Return a config for a small mixture of this kind, and a setting of its runs."""
    data = make_data_folder(folder / "data", vocab_size=97, num_val_tokens=100)
    made(name, folder / "base", **changes)
    sizes = 'preset = "tiny"\nn_layer = 2\nn_head = 2\nn_embd = 32\n'
    text = TINY_RUN.format(data=data).replace(sizes, f'init = "{folder / "base"}"\n')
    (folder / "config.toml").write_text(text, encoding="utf-8")
    return folder / "config.toml", "train.eval_tokens=64"


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / f"checkpoints/step_{step:08d}/model.safetensors")


def test_ten_steps_and_ten_after_a_resume_of_a_mixture_are_twenty(
    run_config: tuple[Path, str], tmp_path: Path
) -> None:
    config, small = run_config
    train_alone(tmp_path / "whole", config, small)
    train_alone(tmp_path / "parts", config, small, "train.steps=10")
    train_alone(tmp_path / "parts", config, small)
    whole, parts = weights(tmp_path / "whole", 20), weights(tmp_path / "parts", 20)
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    rows = [
        json.loads(line)
        for line in (tmp_path / "whole/metrics.jsonl").read_text().split("\n")
        if line
    ]
    idle = [row["idle_experts"] for row in rows if "loss" in row]
    assert len(idle) == 20 and all(0 <= each <= 2 * 16 for each in idle)


def as_of_a_release_without_the_loss(checkpoint: Path) -> None:
    """Write trainer.json as the releases before the balancing loss wrote it."""
    path, manifest = checkpoint / "trainer.json", checkpoint / "manifest.json"
    raw, listed = json.loads(path.read_text()), json.loads(manifest.read_text())
    assert raw.pop("router_loss") is True
    raw["config_toml"], count = re.subn("(?m)^router = .*\n", "", raw["config_toml"])
    assert count == 1
    path.write_text(json.dumps(raw))
    listed["files"][path.name] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
    manifest.write_text(json.dumps(listed))


def test_a_run_of_a_release_without_the_balancing_loss_continues_without_it(
    run_config: tuple[Path, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    config, small = run_config
    run = tmp_path / "run"
    train_alone(run, config, small, "train.steps=1")
    as_of_a_release_without_the_loss(run / "checkpoints/step_00000001")
    for steps in (2, 3):  # the second resume reads the new key of the first
        caplog.clear()
        train_alone(run, config, small, f"train.steps={steps}")
        assert "continues without the routers' balancing loss" in caplog.text
        assert "the loss includes the routers'" not in caplog.text
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first, second, third = [row["loss"] for row in rows if "loss" in row]
    # The loss is at least the factor 0.5 if the experts get equally many tokens.
    assert first > 0.4 + second and first > 0.4 + third


def test_a_run_with_frozen_routers_leaves_them_as_they_are(
    run_config: tuple[Path, str], tmp_path: Path
) -> None:
    config, small = run_config
    train_alone(tmp_path / "run", config, small, "model.router=freeze", "train.steps=2")
    before = load_file(config.parent / "base" / "model.safetensors")
    after = weights(tmp_path / "run", 2)
    gates = [name for name in before if ".gate." in name]
    assert gates and all(torch.equal(before[name], after[name]) for name in gates)
    assert not torch.equal(before["lm_head.weight"], after["lm_head.weight"])


def test_an_adapter_on_a_frozen_router_is_refused(
    run_config: tuple[Path, str], tmp_path: Path
) -> None:
    config, small = run_config
    settings = ("model.router=freeze", "adapter.kind=lora", "adapter.target=gate.weight")
    with pytest.raises(ConfigError, match=r"adapter\.target names the router .*gate"):
        train_alone(tmp_path / "run", config, small, *settings)


@pytest.mark.slow
@pytest.mark.ranks
def test_one_and_two_ranks_train_a_mixture_with_equal_losses(
    run_config: tuple[Path, str], tmp_path: Path
) -> None:
    config, small = run_config
    more = (small, "train.steps=6", "schedule.warmup_steps=0")
    train_alone(tmp_path / "one", config, *more)
    forget_accelerate()
    train_several({tmp_path / "two": more}, config, num_ranks=2)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    one, two = (
        [json.loads(line).get("idle_experts") for line in path.read_text().splitlines()]
        for path in (tmp_path / "one/metrics.jsonl", tmp_path / "two/metrics.jsonl")
    )
    assert one == two and any(each is not None for each in one)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.bf16)])
def test_native_experts_in_shards_train_as_on_one_rank_and_are_saved_whole(
    dtype: str, tmp_path: Path
) -> None:
    config, small = config_of("qwen3_moe", tmp_path)
    more = (small, "train.steps=6", "schedule.warmup_steps=0", f"precision.dtype={dtype}")
    train_alone(tmp_path / "one", config, *more)
    forget_accelerate()
    train_several({tmp_path / "two": (*more, "distributed.strategy=shard")}, config, num_ranks=2)
    bound = 1e-5 if dtype == "fp32" else 1e-2
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=bound)
    one, two = weights(tmp_path / "one", 6), weights(tmp_path / "two", 6)
    assert one.keys() == two.keys() == load_file(tmp_path / "base/model.safetensors").keys()
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in one
    if dtype == "fp32":
        for name, value in one.items():
            torch.testing.assert_close(two[name], value, rtol=1e-3, atol=1e-5, msg=name)


def test_native_experts_with_frozen_routers_and_a_resume_train_as_at_once(tmp_path: Path) -> None:
    config, small = config_of("qwen3_moe", tmp_path)
    more = (small, "model.router=freeze")
    train_alone(tmp_path / "whole", config, *more, "train.steps=4")
    train_alone(tmp_path / "parts", config, *more, "train.steps=2")
    train_alone(tmp_path / "parts", config, *more, "train.steps=4")
    before = load_file(tmp_path / "base/model.safetensors")
    whole, parts = weights(tmp_path / "whole", 4), weights(tmp_path / "parts", 4)
    assert whole.keys() == parts.keys() == before.keys()
    for name, value in whole.items():
        assert torch.equal(value, parts[name]), name
        assert torch.equal(value, before[name]) == name.endswith(".gate.weight"), name


def test_native_experts_whose_layers_are_recomputed_have_the_same_loss_and_gradients(
    tmp_path: Path,
) -> None:
    made("qwen3_moe", tmp_path)
    tokens, targets = random_tokens(97)
    found = []
    for checkpoints in (False, True):
        model = load(tmp_path).train()
        if checkpoints:
            model.enable_checkpointing()
        loss = model(tokens, targets)
        torch.autograd.backward(loss)
        found.append([loss.detach(), *(each.grad for each in model.parameters())])
        with torch.no_grad():
            assert model(tokens, targets) < loss, "an evaluation has no balancing loss"
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))
