"""The table of GPU memory has the numbers that `plan` prints."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from payload.core.errors import ExitCode
from payload.models.llama.spec import read
from payload.orchestrate.__main__ import main
from tests.support.gpu_memory import COMMON, METHODS, memory_gib, model_config, run_config


@pytest.mark.parametrize("method", METHODS)
def test_a_number_is_the_memory_that_plan_prints(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "MODEL"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(model_config("Llama-3.1-8B")), encoding="utf-8")
    # On the machine without a GPU on which this test runs, `auto` means the planned GPU, too.
    settings = [each for each in COMMON if each != "device.kind=cuda"]
    words = [word for each in (*settings, *METHODS[method]) for word in ("--set", each)]
    env = {"PATH": "/usr/bin:/bin"}
    assert main(["plan", "--machine-type", "a2-ultragpu-1g", *words], env) == ExitCode.OK
    printed = f"about {memory_gib('Llama-3.1-8B', method):.1f} GiB a rank"
    assert printed in capsys.readouterr().out


def test_a_gpu_has_no_kernels_and_computes_its_logits_in_chunks() -> None:
    on_gpu = run_config("full")
    on_cpu = on_gpu.on_device("cpu")
    assert on_cpu.uses_kernels() and not on_gpu.uses_kernels()
    spec = read(model_config("Llama-3.1-8B"), where="test").with_sequence_length(4096)
    gpu, cpu = (each.memory_bytes(spec, dtype="bf16", world_size=1) for each in (on_gpu, on_cpu))
    # Weights, both moments and all gradients are fp32.
    assert cpu < 16 * spec.num_params() < gpu
    setting = on_gpu.rank_setting(dtype="bf16", world_size=1)
    assert setting.plain_logits_bytes(128256, tokens=4096) == 16 * 128256 * 1024
    whole = replace(setting, chunks_loss=False)
    assert whole.plain_logits_bytes(128256, tokens=4096) == 16 * 128256 * 4096
