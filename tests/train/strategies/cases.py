"""The runs in the tests of strategies: ranks, strategy, model and settings of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.architecture_cases import CASES, make_folder
from payload.train.models.hf_weights import save_hf
from tests.train.test_model import make_model

STEPS = ("schedule.warmup_steps=0", "train.steps=6", "train.checkpoint_every=3")
SIZES = tuple(f"model.{name}=none" for name in ("n_layer", "n_head", "n_embd"))
"""For weights of `model.init`, which determine their sizes."""

SHARD = "distributed.strategy=shard"
TENSOR = "distributed.tensor_parallel=2"
PIPELINE = "distributed.pipeline_parallel=2"
ZERO3 = "distributed.strategy=zero3"
GROUPS = (SHARD, "distributed.shard_size=2", "batch.micro_batch_size=1")
STAGES = (SHARD, PIPELINE)
BF16 = ("precision.dtype=bf16", "train.steps=3")

TINY = "the config's own"
ODD = "GPT-2, 513 tokens"
"""A vocabulary that is not divisible by two."""
EVEN = "GPT-2, 512 tokens"
DEEP = "three layers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run."""

    ranks: int
    strategy: tuple[str, ...]
    """Overrides that the run of one rank omits."""
    model: str = TINY
    """One of the models above, or the name of a decoder in `CASES`."""
    settings: tuple[str, ...] = ()
    """Overrides in addition to `STEPS`."""
    resumes: str = ""
    """The run that it continues from step 3; `alone` is the run of one rank."""
    spoiled: tuple[int, str] | None = None
    """A rank and its parameter that is changed at step 3."""
    isa: str = ""
    """ONEDNN_MAX_CPU_ISA of the run, if its arithmetic must not depend on the layout of tensors."""
    repeats: bool = False
    """True if other cases cover its code; only `make test-all` runs it."""


STRATEGIES = {
    "shard": Case(ranks=2, strategy=(SHARD,)),
    "tensor": Case(ranks=2, strategy=(TENSOR,), model=ODD),
    "pipeline": Case(ranks=2, strategy=(PIPELINE,), model=DEEP),
    "zero3": Case(ranks=2, strategy=(ZERO3,)),
    "pipeline x shard": Case(ranks=4, strategy=STAGES),
}

RESUMED = {f"{name}, resumed": replace(case, resumes=name) for name, case in STRATEGIES.items()}
"""Resumed on the same ranks."""

CONTINUED = {
    "two groups of shards": Case(ranks=4, strategy=GROUPS, resumes="alone"),
    "zero3 on four ranks": Case(ranks=4, strategy=(ZERO3,), resumes="alone"),
    "two tensor pairs": Case(
        ranks=4, strategy=(TENSOR, "batch.micro_batch_size=1"), model=ODD, resumes="alone"
    ),
    "two pipelines, GPipe": Case(
        ranks=4,
        strategy=(PIPELINE, "distributed.pipeline_schedule=gpipe", "batch.micro_batch_size=1"),
        model=DEEP,
        resumes="alone",
    ),
    "pipeline x tensor": Case(ranks=4, strategy=(PIPELINE, TENSOR), model=DEEP, resumes="alone"),
    "three stages": Case(
        ranks=3, strategy=("distributed.pipeline_parallel=3",), model=DEEP, resumes="alone"
    ),
    "shard to tensor x shard": Case(ranks=4, strategy=(SHARD, TENSOR), resumes="shard"),
    "shard to groups of one shard": Case(
        ranks=4, strategy=(*STAGES, "distributed.shard_size=1"), resumes="shard"
    ),
    "shard to zero3": Case(ranks=2, strategy=(ZERO3,), resumes="shard"),
    "shard to tensor": Case(ranks=2, strategy=(TENSOR,), resumes="shard"),
    "shard to pipeline": Case(ranks=2, strategy=(PIPELINE,), resumes="shard"),
    "zero3 to shard": Case(ranks=2, strategy=(SHARD,), resumes="zero3"),
}
"""Resumed under another strategy or on another number of ranks."""

KERNELS = {
    f"{name}, bf16": replace(STRATEGIES[name], settings=BF16)
    for name in ("shard", "tensor", "pipeline")
}

WITHOUT_KERNELS = {
    f"{name}, bf16 without kernels": replace(
        STRATEGIES[name],
        settings=(*BF16, "engine.kernels=off"),
        # With AMX tiles, oneDNN adds in an order that depends on the layout of the weights, which
        # differs between DeepSpeed and shards.
        isa="AVX512_CORE_BF16",
        repeats=True,
    )
    for name in ("shard", "zero3")
}

_LORA = ("adapter.kind=lora", "adapter.rank=4", "batch.global_batch_size=6")
ADAPTERS = {
    f"{name}, adapter": replace(
        STRATEGIES[name],
        ranks=3,
        model=EVEN,
        settings=(*_LORA, "memory.activation_checkpointing=on"),
    )
    for name in ("shard", "zero3")
}
"""With a base in uneven parts."""

_DECODERS: tuple[tuple[str, str, tuple[str, ...], bool], ...] = (
    ("tensor", "llama, untied, biases", ("memory.activation_checkpointing=on",), False),
    ("tensor", "qwen3", ("engine.kernels=off",), True),
    ("tensor", "qwen3", ("precision.dtype=bf16",), False),
    ("tensor", "gemma3_text", (), True),
    ("tensor", "phi3, partial longrope", ("precision.dtype=bf16",), True),
    ("zero3", "qwen3_moe", (), True),
    ("pipeline", "llama, untied, biases", ("memory.activation_checkpointing=on",), True),
    ("pipeline", "gemma3_text", ("engine.kernels=off",), False),
    ("pipeline", "qwen3", ("precision.dtype=bf16",), True),
    ("tensor", "granite 4, dense", ("precision.dtype=bf16",), True),
    ("pipeline", "granite", ("precision.dtype=bf16",), True),
    ("pipeline", "olmo3", ("precision.dtype=bf16",), True),
    ("pipeline x shard", "olmo3", (), True),
)
"""Strategy, model, settings, and `Case.repeats`."""
DECODERS = {
    f"{name} of {model}, {' '.join(settings) or 'fp32'}": replace(
        STRATEGIES[name],
        model=model,
        settings=("optimizer.lr=1e-4", *settings),
        repeats=repeats,
    )
    for name, model, settings, repeats in _DECODERS
}

DROPOUT = {
    "tensor, dropout": Case(
        ranks=2,
        strategy=(TENSOR,),
        settings=("model.dropout=0.2", "train.steps=3", "train.sync_check_every=1"),
    )
}

READS_PARTS = {
    "three shards": Case(
        ranks=3,
        strategy=(SHARD,),
        model=EVEN,
        settings=("train.steps=3", "batch.global_batch_size=6"),
    ),
    **{
        f"{name} of {model}": Case(
            ranks=4,
            strategy=strategy,
            model=model,
            settings=("train.steps=3", "batch.micro_batch_size=1"),
        )
        for model in (ODD, "llama, untied, biases, 601 tokens")
        for name, strategy in {
            "pipeline x tensor": (PIPELINE, TENSOR),
            "pipeline x shard": (PIPELINE, SHARD),
            "tensor x shard": (TENSOR, SHARD),
        }.items()
    },
}
"""Runs from `model.init`."""

SPOILED = {
    "shard, spoiled": Case(ranks=4, strategy=GROUPS, spoiled=(3, "h.0.mlp.c_fc.weight")),
    "tensor, spoiled": Case(ranks=2, strategy=(TENSOR,), spoiled=(1, "h.0.ln_1.weight")),
    "pipeline, spoiled": replace(STRATEGIES["pipeline"], spoiled=(1, "wte.weight")),
    "tied head, spoiled": Case(ranks=4, strategy=STAGES, spoiled=(1, "wte.weight")),
    "replica of a stage, spoiled": Case(
        ranks=4,
        strategy=(*STAGES, "distributed.shard_size=1"),
        spoiled=(1, "h.0.mlp.c_fc.weight"),
    ),
}

RUNS = (
    *(STRATEGIES, RESUMED, CONTINUED, KERNELS, WITHOUT_KERNELS, ADAPTERS, DECODERS, DROPOUT),
    *(READS_PARTS, SPOILED),
)
"""Every table; a name is in exactly one of them."""


def is_slow(case: Case) -> bool:
    """Return True for repeats, for runs on more ranks, and with DeepSpeed, which must be built."""
    takes_long = case.ranks > 2 or ZERO3 in case.strategy or case.resumes == "zero3"
    return case.repeats or takes_long


def names(cases: Mapping[str, Case]) -> list[Any]:
    """Return the parameters of a test over these runs.

    `make test-all` has the slow ones, `make test-seeds` those with DeepSpeed on more ranks.
    """

    def marks(case: Case) -> list[pytest.MarkDecorator]:
        if ZERO3 in case.strategy and case.ranks > 2:
            return [pytest.mark.seeds]
        return [pytest.mark.slow] if is_slow(case) else []

    return [pytest.param(name, marks=marks(case)) for name, case in cases.items()]


def model_overrides(model: str, folder: Path) -> tuple[str, ...]:
    """Return the overrides for a model, and write its files to `folder`."""
    if model == TINY:
        return ()
    if model == DEEP:
        return ("model.n_layer=3",)
    if model in (ODD, EVEN):
        folder.mkdir()
        size = 513 if model == ODD else 512
        save_hf(make_model(n_embd=32, n_head=2, n_layer=2, vocab_size=size), folder)
    else:
        name = model.removesuffix(", 601 tokens")
        size = 600 if name == model else 601
        make_folder({**CASES[name], "vocab_size": size, "num_key_value_heads": 2}, folder)
    return (*SIZES, f"model.init={folder}")
