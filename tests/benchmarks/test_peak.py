"""The peak benchmark measures the instructions that this CPU has, and no others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness import REPO
from benchmarks.peak import BANDWIDTHS, KINDS, Peak, scaling

pytestmark = pytest.mark.processes

FLAGS = {
    "AMX bf16": {"amx_tile", "amx_bf16"},
    "AVX-512 bf16": {"avx512_bf16"},
    "AVX-512 fp32": {"avx512f"},
    "AVX2 fp32": {"avx2", "fma"},
}
"""The flags in /proc/cpuinfo of the CPUs that have a kind of instructions."""


def test_instructions_that_the_cpu_lacks_are_not_measured() -> None:
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    flags = set(next((line for line in text.splitlines() if line.startswith("flags")), "").split())
    peak = Peak(budget_s=0.001, rounds=1)
    found = {kind for kind in KINDS if peak.flops_per_s(kind, "registers", threads=1)}
    assert found == {kind for kind, needed in FLAGS.items() if needed <= flags}


def test_no_tile_instruction_runs_where_onednn_may_use_none() -> None:
    program = (
        "from benchmarks.peak import Peak; "
        "print(Peak(budget_s=0.001, rounds=1).flops_per_s('AMX bf16', 'registers', threads=1))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=REPO,
        env={**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "None\n"


def test_cpus_that_share_a_core_are_told_from_cores() -> None:
    apart = {"AMX bf16, registers": {1: 3.0, 2: 5.6}, "torch's GEMM, bf16": {1: 1.0, 2: 1.0}}
    assert scaling(apart) == (
        "2 threads are 1.87 times as fast as one in registers: a physical core each"
    )
    shared = {"AVX2 fp32, registers": {1: 3.0, 2: 3.3}}
    assert scaling(shared).endswith("1.10 times as fast as one in registers: physical cores shared")


@pytest.mark.seeds
def test_the_last_line_has_every_rate_for_one_and_all_threads() -> None:
    command = [sys.executable, "-m", "benchmarks.peak", "--seconds", "0.001", "--rounds", "1"]
    done = subprocess.run(
        [*command, "--threads", "2", "--json"], cwd=REPO, capture_output=True, text=True, check=True
    )
    line = json.loads(done.stdout.splitlines()[-1])
    assert line["threads_measured"] == [1, 2]
    rates = line["flops_per_s"] | line["bytes_per_s"]
    assert {"torch's GEMM, bf16", "torch's GEMM, fp32"} < set(rates)
    assert {f"{BANDWIDTHS[0]}, L2", f"{BANDWIDTHS[0]}, memory"} < set(rates)
    assert all(set(each) == {"1", "2"} and min(each.values()) > 0 for each in rates.values())
