"""The kernels' build: who runs it, the log message if it fails, and the fallback to torch."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from payload.config.training_sections import EngineSection, OptimizerSection
from payload.kernels import build
from payload.kernels.build import SOURCES, built_library
from payload.kernels.kernels import Kernels
from payload.kernels.library import Library
from payload.kernels.unavailable import KernelsUnavailableError
from payload.machines.machine_facts import COMPILERS
from payload.train.optimizers.optimizer import build_optimizers
from payload.train.torch_engines import apply_engine
from tests.support.launching import losses, rank_env, run, train_program
from tests.train.alone import ALONE
from tests.train.test_model import make_model


def test_the_engine_uses_kernels_only_where_it_says(
    monkeypatch: pytest.MonkeyPatch, library: Library
) -> None:
    monkeypatch.setattr("payload.train.torch_engines.find_kernels", lambda: Kernels(library))
    for settings, expected in [
        (EngineSection(), True),
        (EngineSection(kernels="off"), False),
        (EngineSection(compile=True), False),
    ]:
        model = make_model()
        optimizers = build_optimizers(model, OptimizerSection())
        apply_engine(model, optimizers, settings=settings, world=ALONE)
        assert (model.kernels is not None) is expected


def test_without_a_compiler_the_reason_says_how_to_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KernelsUnavailableError, match=r"no C\+\+ compiler \(apt-get install g"):
        built_library(tmp_path / "cache")


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    "cpu",
    [
        "x86-64",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("haswell", "sapphirerapids")),
        *(
            pytest.param(name, marks=pytest.mark.seeds)
            for name in ("cascadelake", "icelake-server")
        ),
    ]
    if platform.machine() == "x86_64"
    else [],
)
def test_other_cpus_code_compiles(cpu: str, source: str) -> None:
    compiler = next(found for name in COMPILERS if (found := shutil.which(name)))
    file = Path(build.__file__).parent / source
    flags = ["-std=c++17", "-fopenmp", "-fsyntax-only", f"-march={cpu}"]
    subprocess.run([compiler, *flags, file], check=True)


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_compiler(tmp_path / "bin", "echo 'x.cpp:1: error: no such thing' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin")
    with pytest.raises(KernelsUnavailableError, match=r"g\+\+ failed: x.cpp:1: error: no such"):
        built_library(tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["build.lock"]


def test_of_many_that_ask_at_once_one_builds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, built: Path
) -> None:
    count = tmp_path / "count"
    find_output = 'while [ "$1" != -o ]; do shift; done'
    fake_compiler(tmp_path / "bin", f'echo built >> "{count}"; {find_output}; cp "{built}" "$2"')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(built_library, [tmp_path / "cache"] * 4))
    assert len(found) == 1
    assert found.pop().read_bytes() == built.read_bytes()
    assert count.read_text() == "built\n" * (len(SOURCES) + 1)  # the last call links


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KernelsUnavailableError, match=r"file/cache cannot be used"):
        built_library(tmp_path / "file" / "cache")


@pytest.mark.slow
@pytest.mark.ranks
def test_the_trainer_trains_the_same_without_a_compiler(
    tmp_path: Path, tiny_config: Path, built: Path
) -> None:
    cache = tmp_path / "home_with" / ".cache" / "tileforge" / "kernels"
    cache.mkdir(parents=True)
    shutil.copy(built, cache)
    for name, path in (("with", os.environ["PATH"]), ("without", str(tmp_path))):
        environment = rank_env(HOME=str(tmp_path / f"home_{name}"), PATH=path)
        program = train_program(
            tmp_path / name, tiny_config, "precision.dtype=bf16", "train.steps=5"
        )
        result = run([sys.executable, *program], env=environment)
        assert result.returncode == 0, result.stderr
        assert ("kernels   none (this machine has no C++ compiler" in result.stderr) is (
            name == "without"
        )
    assert losses(tmp_path / "without") == pytest.approx(losses(tmp_path / "with"), rel=2e-3)


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the levels are x86-64's")
def test_a_lower_instruction_set_is_built_apart_and_has_no_bf16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KernelsUnavailableError, match="TILEFORGE_CPU_ISA = sse: must be avx2 or"):
        built_library(tmp_path, isa="sse")
    flags = "flags : fpu avx avx2 fma"
    monkeypatch.setattr(build, "_cpu_description", lambda: [flags])
    assert build.target_flags("avx2")[0] == "-march=x86-64-v3"
    # The variable never raises the level.
    assert build.target_flags("avx512") == build.target_flags(None) == ("-march=native",)
    low = Library(built_library(tmp_path, isa="avx2"))
    assert not low.has_products
    assert Kernels(low).layers_note("fp32") is None
    assert "no bf16" in str(Kernels(low).layers_note("bf16"))
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    note = Kernels(low).layers_note("bf16")
    assert note and note.endswith("(PyTorch's bf16 brgemm does not support aarch64)")
    x = torch.linspace(-4, 4, 300)
    expected = torch.nn.functional.gelu(x, approximate="tanh")
    assert torch.allclose(low.gelu_forward(x), expected, atol=1e-6)
    qkv = torch.zeros(1, 4, 3, 2, 8)
    low.attention_forward(qkv)
    with pytest.raises(ValueError, match="attention_forward_bf16 needs bf16 matmuls"):
        low.attention_forward(qkv.bfloat16())
    with pytest.raises(ValueError, match="weight_gradient needs"):
        rows = x.view(3, 100).bfloat16()
        low.weight_gradient(rows, rows, torch.empty(100, 100), add=False)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the instruction sets are x86-64's")
def test_a_library_for_another_cpu_is_refused_by_the_instructions_that_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only AMD's CPUs of 2011 to 2017 have this instruction set.
    monkeypatch.setattr(build, "target_flags", lambda _isa: ("-mfma4",))
    with pytest.raises(KernelsUnavailableError, match="needs fma4, which this CPU lacks"):
        Library(built_library(tmp_path, sources=[Path(build.__file__).parent / "instructions.cpp"]))


def fake_compiler(folder: Path, script: str) -> None:
    """Write a fake `g++`."""
    folder.mkdir()
    (folder / "g++").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "g++").chmod(0o755)
