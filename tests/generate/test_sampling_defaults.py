"""A chat samples as the model's generation_config.json says; without it, greedily."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from payload.core.errors import ExitCode
from payload.generate.__main__ import main
from payload.generate.arguments import parser
from payload.generate.sampling import SamplingOptions, _nucleus
from payload.generate.sampling_defaults import CONTINUATION, sampling_of
from tests.generate.test_chat import folder as folder

QWEN = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20}
"""Sampling settings of Qwen2.5-Instruct."""


def chosen(config: dict[str, Any], *words: str, is_chat: bool = True) -> SamplingOptions:
    arguments = parser().parse_args(["model", *words])
    return sampling_of(arguments, is_chat=is_chat, generation_config=config).options


def test_a_chat_takes_the_models_values_and_the_users_come_first() -> None:
    found = chosen({**QWEN, "repetition_penalty": 1.05})
    assert (found.temperature, found.top_p, found.top_k) == (0.7, 0.8, 20)
    assert found.repetition_penalty == 1.05
    found = chosen(QWEN, "--temperature", "0.1", "--top-k", "0", "--top-p", "1")
    assert (found.temperature, found.top_p, found.top_k) == (0.1, 1.0, None)


def test_a_chat_without_the_models_values_is_greedy_except_for_several_samples() -> None:
    found = chosen({"eos_token_id": 2})
    assert (found.temperature, found.num_samples, found.max_new_tokens) == (0.0, 1, 1024)
    assert chosen({}, "--temperature", "1").top_k == 50
    assert chosen({}, "--num-samples", "3").temperature == CONTINUATION.temperature
    assert chosen({"do_sample": False, "top_k": 5}).temperature == 0.0


def test_a_continuation_ignores_the_models_values() -> None:
    assert chosen(QWEN, is_chat=False) == CONTINUATION


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [-1, float("nan"), float("inf"), "hot", True, None]),
        ("top_k", [-1, 1.5, 2**40, "many", False]),
        ("top_p", [0, 1.1, float("nan"), [0.5]]),
        ("repetition_penalty", [0, -2, float("inf"), {}]),
    ],
)
def test_invalid_values_of_a_model_are_ignored(name: str, values: list[object]) -> None:
    for value in values:
        assert chosen({name: value}) == chosen({}), value


def test_a_nucleus_is_transformers() -> None:
    from transformers import TopPLogitsWarper

    logits = torch.randn((20, 50), generator=torch.Generator().manual_seed(3))
    for top_p in (0.01, 0.5, 0.9, 0.999):
        # Any: the annotation is LongTensor, but the warper reads no tokens.
        expected: Any = TopPLogitsWarper(top_p)(torch.zeros((20, 1), dtype=torch.int64), logits)
        kept = _nucleus(logits.softmax(dim=1), top_p=top_p) > 0
        assert torch.equal(kept, torch.isfinite(expected))


@pytest.mark.processes
def test_the_command_reads_the_file_and_prints_the_values(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "generation_config.json").write_text(json.dumps(QWEN), encoding="utf-8")
    words = ["--chat", "--prompt", "Hello", "--max-new-tokens", "2"]
    assert main([str(folder), *words]) == ExitCode.OK
    note = "sampling: temperature 0.7, top_k 20, top_p 0.8, from the model's generation_config.json"
    assert note in capsys.readouterr().err.splitlines()
    assert main([str(folder), "--prompt", "Hello", "--max-new-tokens", "2"]) == ExitCode.OK
    assert "sampling:" not in capsys.readouterr().err


@pytest.mark.parametrize("value", ["0", "1.5", "nan", "x"])
def test_a_top_p_that_is_no_share_is_refused(value: str) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["model", "--top-p", value])
    assert raised.value.code == 2
