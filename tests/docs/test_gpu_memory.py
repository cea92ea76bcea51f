"""The table of GPU memory has the numbers that `plan` prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from payload.core.errors import ExitCode
from payload.orchestrate.__main__ import main
from tests.support.gpu_memory import COMMON, METHODS, memory_gib, model_config


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
