"""`preflight --inventory local`: one screen, with what to do on each line."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from payload.config.run_config import RunConfig, parse_run_config
from payload.core.errors import ExitCode
from payload.launch.ranks import place_ranks
from payload.machines.cgroup_limits import CgroupLimits
from payload.machines.machine import discover
from payload.machines.machine_facts import (
    MachineFacts,
    find_compiler,
    instructions_of,
    read_machine_facts,
)
from payload.orchestrate.__main__ import main
from payload.orchestrate.findings.nodes import Finding
from payload.orchestrate.findings.trial import Measured, NodeSpeed
from payload.orchestrate.machine_profiles.local_profile import LocalAccess
from payload.orchestrate.preflight.checks import check_this_machine
from payload.orchestrate.preflight.machine_screen import screen
from payload.orchestrate.preflight.report import Report
from tests.support.cgroup import ControlGroup
from tests.support.launching import REPO

pytestmark = pytest.mark.processes

LINES, COLUMNS = 24, 80
_GIB = 2**30


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep records of the trial out of this folder."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.ranks
def test_the_whole_command_fits_on_one_screen_with_what_was_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["preflight", "--inventory", "local"], os.environ) == ExitCode.OK
    said = capsys.readouterr()
    lines = said.out.splitlines()
    # The command's line, and the lines of stderr.
    assert 1 + len(lines) + len(said.err.splitlines()) <= LINES
    assert max(map(len, lines)) <= COLUMNS
    labels = [line[:13].strip() for line in lines if line[0] != " "]
    named = ["CPU", "instructions", "runs fast", "matmuls", "memory", "limits", "disk"]
    named += ["compiler", "allocator", "NUMA", "launcher"]
    assert [label for label in labels if label in named] == named
    assert "measured" in said.out and "mpirun ok" in said.out


def test_the_limits_of_a_control_group_are_shown(control_group: ControlGroup) -> None:
    program = ["-m", "payload.orchestrate", "preflight", "--inventory", "local", "--quick"]
    with control_group(cpus=0.75, memory_bytes=2 * _GIB) as inside:
        done = subprocess.run(
            [*inside, sys.executable, *program],
            env=os.environ | {"PYTHONPATH": str(REPO)},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == ExitCode.OK, done.stderr
    words = " ".join(done.stdout.split())
    assert "limits a quota of 0.75 of " in words and ", 2.0 of " in words
    assert "memory 2.0 GiB" in words and "a run starts 1 rank of 1 thread " in words
    assert "-> Raise them for a larger run" in words


FACTS = MachineFacts(
    system="Linux",
    cpu="A CPU",
    instructions=("AMX", "AVX-512 with bf16"),
    cpus=8,
    usable_cpus=8,
    limits=CgroupLimits(),
    total_memory_bytes=32 * _GIB,
    free_memory_bytes=30 * _GIB,
    free_disk_bytes=100 * _GIB,
    compiler="/usr/bin/g++",
    libc=("glibc", "2.36"),
    huge_pages="madvise",
)


@pytest.fixture(scope="module")
def report() -> Report:
    """The checks of this machine, with the flags of a CPU with AMX and without findings."""
    made = check_this_machine(discover().inventory(), LocalAccess(os.environ))
    facts = {
        name: replace(each, cpu_flags=("amx_bf16", "avx512_bf16"))
        for name, each in made.facts.items()
    }
    return replace(made, findings=[], notes=[], facts=facts)


def rows(
    facts: MachineFacts, report: Report, *, config: RunConfig | None = None, gpus: bool = False
) -> dict[str, str]:
    """Return each row's text, with its advice, by label."""
    config = config or RunConfig()
    nodes = discover().inventory().nodes
    placement = None if gpus else place_ranks(nodes, config.launch)
    lines = screen(facts, report, placement, config=config)
    assert len(lines) < LINES and max(map(len, lines)) <= COLUMNS
    found: dict[str, str] = {}
    label = ""
    for line in lines:
        label = line[:13].strip() or label
        found[label] = f"{found.get(label, '')} {line[13:].strip()}".strip()
    return found


def test_a_good_machine_has_nothing_to_do(report: Report) -> None:
    found = rows(FACTS, report)
    assert not any("->" in text for text in found.values())
    assert found["runs fast"] == "layers, loss and AdamW run on the project's kernels in bf16"
    assert found["limits"] == "none set by a container, job or service"


@pytest.mark.parametrize(
    ("change", "label", "words"),
    [
        ({"compiler": None}, "compiler", "none -> Install one: apt-get install g++"),
        ({"compiler": None}, "runs fast", "PyTorch alone, without the project's kernels: this"),
        ({"system": "Darwin"}, "runs fast", "kernels: they need Linux"),
        ({"huge_pages": "never"}, "allocator", "-> Allow huge pages: echo madvise | sudo tee"),
        ({"libc": ("glibc", "2.31")}, "allocator", "-> glibc 2.35 and later also use huge pages."),
        ({"libc": ("", "")}, "allocator", "-> Runs cannot tune this allocator"),
        ({"free_memory_bytes": 2 * _GIB}, "memory", "2.0 free: a run uses at most what is free"),
        ({"free_memory_bytes": 2 * _GIB}, "memory", "-> Stop other programs"),
        ({"usable_cpus": 3}, "limits", "3 of 8 CPUs allowed -> Raise them"),
        ({"limits": CgroupLimits(cpus=2.5)}, "limits", "a quota of 2.5 of 8 CPUs ->"),
        ({"limits": CgroupLimits(memory_bytes=4 * _GIB)}, "limits", "4.0 of 32.0 GiB of memory"),
        ({"limits": CgroupLimits(memory_bytes=4 * _GIB)}, "memory", "4.0 GiB"),
        ({"instructions": ()}, "instructions", "none that are known"),
        ({"cpu": "\x1b[2JEvil"}, "CPU", "Evil, "),
    ],
)
def test_each_lack_is_on_its_line_with_what_to_do(
    change: dict[str, Any], label: str, words: str, report: Report
) -> None:
    assert words in rows(replace(FACTS, **change), report)[label]
    assert words not in rows(FACTS, report)[label]


def test_unknown_free_memory_is_left_out(report: Report) -> None:
    assert rows(replace(FACTS, free_memory_bytes=None), report)["memory"] == "32.0 GiB"


def test_a_limit_above_the_machine_is_none(report: Report) -> None:
    limits = CgroupLimits(cpus=64.0, memory_bytes=2**50)
    assert rows(replace(FACTS, limits=limits), report)["limits"].startswith("none")


def test_on_arm_the_layers_run_on_pytorch_in_bf16(report: Report) -> None:
    facts = {
        name: replace(each, architecture="aarch64", cpu_flags=("bf16",))
        for name, each in report.facts.items()
    }
    text = rows(FACTS, replace(report, facts=facts))["runs fast"]
    assert text.endswith("kernels; the layers run on PyTorch in bf16")


def test_a_cpu_without_bf16_computes_the_layers_in_fp32(report: Report) -> None:
    facts = {name: replace(each, cpu_flags=()) for name, each in report.facts.items()}
    text = rows(FACTS, replace(report, facts=facts))["runs fast"]
    assert text.endswith("the project's kernels in fp32, as the CPU has no bf16 instructions")


@pytest.mark.parametrize(("bf16", "words"), [(3e12, "in bf16"), (0.5e12, "is no faster in bf16")])
def test_what_was_measured_decides_over_the_flags(bf16: float, words: str, report: Report) -> None:
    (name,) = report.facts
    speed = NodeSpeed(bf16_flops_per_s=bf16, fp32_flops_per_s=1e12, received_bytes_per_s=None)
    measured = Measured(
        world_size=1, nodes={name: speed}, all_reduce_bytes_per_s=None, latency_s=None
    )
    found = rows(FACTS, replace(report, measured=measured))
    assert found["runs fast"].endswith(words)
    assert found["matmuls"] == f"{bf16 / 1e12:.2f} TFLOP/s in bf16, 1.00 in fp32, measured"


def test_settings_of_the_engine_and_gpus_are_reasons(report: Report) -> None:
    config = parse_run_config("[engine]\nkernels = 'off'", where="test")
    assert "a setting of [engine]" in rows(FACTS, report, config=config)["runs fast"]
    found = rows(FACTS, report, gpus=True)
    assert found["runs fast"].startswith("PyTorch on the GPUs") and "NUMA" not in found
    assert found["GPU"] == "-"


def test_findings_are_below_their_line_or_have_their_own(report: Report) -> None:
    (name,) = report.facts

    def finding(check: str, *log: str) -> Finding:
        return Finding(
            node=name, check=check, severity="error", cause="Broken", fix="Fix it.", log=log
        )

    found = rows(FACTS, replace(report, findings=[finding("disk"), finding("store", "a log")]))
    assert found["disk"].endswith("-> error: Broken. Fix it.")
    assert found["store"] == "error -> error: Broken. Fix it." and found["| a log"] == ""


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ("fpu avx2 avx512f avx512_bf16 amx_bf16", ("AMX", "AVX-512 with bf16")),
        ("avx2 avx512f", ("AVX-512",)),
        ("avx2", ("AVX2",)),
        ("asimd sve bf16", ("bf16", "SVE")),
        ("asimd asimddp", ("NEON",)),
        ("fpu", ()),
    ],
)
def test_instructions_that_another_set_includes_are_left_out(
    flags: str, found: tuple[str, ...]
) -> None:
    assert instructions_of(flags.split()) == found


def test_facts_are_read_from_the_kernel_s_files(tmp_path: Path) -> None:
    for name, text in {
        "cpuinfo": "processor : 0\nmodel name\t: AMD EPYC 9B14\nflags\t: avx2\nmodel name: x\n",
        "kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
        "fs/cgroup/cpu.max": "50000 100000\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    found = read_machine_facts(path=str(tmp_path), sys_root=tmp_path, proc_root=tmp_path)
    assert (found.cpu, found.instructions) == ("AMD EPYC 9B14", ("AVX2",))
    assert (found.huge_pages, found.limits.cpus, found.compiler) == ("never", 0.5, None)
    empty = read_machine_facts(path="", sys_root=tmp_path / "no", proc_root=tmp_path / "no")
    assert empty.cpu and empty.free_memory_bytes is None and empty.huge_pages is None


def test_a_compiler_is_found_on_the_path_of_the_run(tmp_path: Path) -> None:
    assert find_compiler(str(tmp_path)) is None
    for name in ("clang++", "g++"):
        (tmp_path / name).write_text("#!/bin/sh\n", encoding="ascii")
        (tmp_path / name).chmod(0o755)
        assert find_compiler(str(tmp_path)) == str(tmp_path / name)
