"""GPUs from the output of nvidia-smi, read on the node and checked here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from payload.config.run_config import parse_run_config
from payload.core.errors import ExitCode
from payload.core.validation.records import build
from payload.launch.environment import launcher_environment
from payload.machines.gpu_catalog import NVIDIA_DRIVER_BRANCH, least_driver_branch
from payload.machines.inventory import Node
from payload.machines.machine import discover
from payload.orchestrate.__main__ import main
from payload.orchestrate.hardware.nvidia import QUERY, Fault, GpuNeed, NvidiaFacts, gpu_faults
from payload.orchestrate.inventories.chosen import ResolvedInventory, load_cluster
from payload.orchestrate.machine_profiles.local_profile import LocalAccess
from payload.orchestrate.node import look
from payload.orchestrate.node.look import nvidia
from payload.orchestrate.preflight import checks
from payload.orchestrate.preflight.cluster_trial import try_this_machine
from tests.support.nvidia_smi import A100, L4, make_nvidia_smi, make_torch
from tests.support.waiting import DEADLINE_S
from tests.test_architecture import ROOT

pytestmark = pytest.mark.processes

NODE = Node(
    name="a", address="10.0.0.2", physical_cores=4, memory_gib=16.0, gpus=2, gpu_memory_gib=22.49
)
NEED = GpuNeed(why="device.kind = 'cuda'", ranks_per_node=None)
NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that "
    "the latest NVIDIA driver is installed and running."
)
MISMATCH = (
    "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.95"
)


def ask(folder: Path, *, visible: str | None = None) -> NvidiaFacts:
    """Return the result of the node's program with `folder` as PATH."""
    env = {"PATH": str(folder)} | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    answer = nvidia(",".join(QUERY), torch=(str(folder), "version.py"), env=env)
    return build(NvidiaFacts, json.loads(json.dumps(answer)), where="here")


def faults(facts: NvidiaFacts, **changes: Any) -> list[Fault]:
    return list(gpu_faults(facts, need=NEED, node=replace(NODE, **changes)))


def test_two_good_gpus_have_no_fault_and_are_described_in_one_line(tmp_path: Path) -> None:
    make_torch(make_nvidia_smi(tmp_path, L4, L4))
    facts = ask(tmp_path)
    assert faults(facts) == []
    assert facts.describe() == (
        "2 x NVIDIA L4 (22.5 GiB), driver 580.95.05, ECC on, torch 2.13.0+cu130 with CUDA 13.0"
    )
    assert [gpu.capability for gpu in facts.visible_devices()] == ["8.9", "8.9"]


@pytest.mark.parametrize(
    ("changes", "build_of", "severity", "cause"),
    [
        ({"driver_version": "535.183.01"}, {}, "error", "its driver 535.183.01 is too old: torch"),
        ({"driver_version": "580.65.06"}, {}, None, ""),
        ({"driver_version": "535.183.01"}, {"cuda": "12.8"}, None, ""),
        ({"driver_version": "470.256.02"}, {"cuda": "12.8"}, "error", "needs branch 525 or later"),
        ({}, {"version": "2.13.0+cpu", "cuda": None}, "error", "torch 2.13.0+cpu is a build witho"),
        ({}, {"cuda": "14.0"}, "warning", "CUDA 14.0 is unknown"),
        ({"mig.mode.current": "Enabled"}, {}, "warning", "GPU 0 is in MIG mode"),
        (
            {"ecc.errors.uncorrected.volatile.total": "3"},
            {},
            "warning",
            "GPU 0 has 3 uncorrected ECC error(s)",
        ),
        (
            {"ecc.mode.current": "[N/A]", "ecc.errors.uncorrected.volatile.total": "[N/A]"},
            {},
            None,
            "",
        ),
        (
            {"memory.total": "15360"},
            {},
            "error",
            "GPU 0 has 15.0 GiB of memory, but the",
        ),
        ({"name": "Vendor's, with a comma"}, {}, None, ""),
    ],
)
def test_each_fault_of_a_gpu_or_its_driver_is_one_line(
    tmp_path: Path,
    changes: dict[str, str],
    build_of: dict[str, Any],
    severity: str | None,
    cause: str,
) -> None:
    make_torch(make_nvidia_smi(tmp_path, L4 | changes), **build_of)
    found = faults(ask(tmp_path), gpus=1)
    assert [fault.severity for fault in found] == ([severity] if severity else [])
    assert all(cause in fault.cause and fault.fix.endswith(".") for fault in found)


@pytest.mark.parametrize(
    ("status", "said", "cause", "fix"),
    [
        (9, NO_DRIVER, "nvidia-smi fails with status 9: NVIDIA-SMI has failed", "modprobe nvidia"),
        (18, MISMATCH, "status 18: Failed to initialize NVML", "Reboot the node"),
        (6, "No devices were found", "status 6: No devices were found", "dmesg"),
        (0, "No devices were found", "shows no GPU: No devices were found", "dmesg"),
        (2, 'Field "compute_cap" is not a valid field to query.', "status 2: Field", "branch 580"),
    ],
)
def test_an_nvidia_smi_that_fails_is_quoted_with_a_fix_for_its_status(
    tmp_path: Path, status: int, said: str, cause: str, fix: str
) -> None:
    (found,) = faults(ask(make_nvidia_smi(tmp_path, status=status, said=said)))
    assert found.severity == "error" and cause in found.cause and fix in found.fix


def test_an_nvidia_smi_that_hangs_or_is_not_there_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(look, "_SMI_S", 0.2)
    hangs = ask(make_nvidia_smi(tmp_path / "hangs", L4, pause_s=60.0))
    assert [fault.cause for fault in faults(hangs)] == ["nvidia-smi does not respond"]
    (tmp_path / "none").mkdir()
    (absent,) = faults(ask(tmp_path / "none"))
    assert (
        absent.severity == "error"
        and absent.cause == "nvidia-smi is missing, but device.kind = 'cuda' requires GPUs"
    )


def test_without_nvidia_smi_a_build_with_cuda_is_left_to_the_trial(tmp_path: Path) -> None:
    make_torch(tmp_path)
    facts = ask(tmp_path)
    (found,) = faults(facts)
    assert found.severity == "warning" and "The trial shows" in found.fix
    make_torch(tmp_path, version="2.13.0+cpu", cuda=None)
    assert [fault.severity for fault in faults(ask(tmp_path))] == ["error"]
    # For this machine the plan detects whether it has a device.
    assert [*gpu_faults(facts, need=NEED, node=NODE, has_device=True)] == []
    (found,) = gpu_faults(facts, need=NEED, node=NODE, has_device=False)
    assert found.severity == "error"


def test_a_gpu_counts_once_and_a_row_without_a_uuid_is_none(tmp_path: Path) -> None:
    twin = L4 | {"uuid": "GPU-1"}
    facts = ask(make_nvidia_smi(tmp_path, twin, twin, said="0" + "," * 8))
    assert [gpu.uuid for gpu in facts.visible_devices()] == ["GPU-1"]
    shown, warned = faults(facts)
    assert "nvidia-smi shows 1 GPU(s)" in shown.cause
    assert warned.severity == "warning" and "nvidia-smi prints: 0,,," in warned.cause


def test_a_long_list_of_visible_gpus_and_an_odd_torch_are_refused_nowhere(tmp_path: Path) -> None:
    make_torch(make_nvidia_smi(tmp_path, L4), version="2.13" + "\u00e9" * 99, cuda="13.0-odd")
    long = ask(tmp_path, visible="0," * 4096)
    (cut,) = (fault for fault in faults(long, gpus=1) if fault.severity == "warning")
    assert cut.cause == "only the first 4,096 characters of CUDA_VISIBLE_DEVICES were read"
    assert long.torch is not None and long.torch.cuda == "13.0-odd"
    assert long.torch.version == "2.13" + "?" * 60


@pytest.mark.parametrize(
    ("status", "said", "words"),
    [
        (18, MISMATCH, "nvidia-smi fails with status 18: Failed to initialize NVML"),
        (0, "No devices were found", "nvidia-smi shows no GPU: No devices were found. See"),
    ],
)
def test_a_failing_nvidia_smi_here_is_noted_by_commands_that_use_no_gpu(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    status: int,
    said: str,
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    smi = make_nvidia_smi(tmp_path / "bin", status=status, said=said)
    env = {**os.environ, "PATH": f"{smi}{os.pathsep}{os.environ['PATH']}"}
    assert main(["plan", "--inventory", "local"], env) == ExitCode.OK
    (note,) = [line for line in capsys.readouterr().err.splitlines() if "nvidia-smi" in line]
    assert note.startswith(f"note: GPUs of this machine are ignored: {words}")
    bare = load_cluster("local", env={**os.environ, "PATH": str(tmp_path)})
    assert bare.nvidia is not None and "note" not in bare.headline()


@pytest.mark.parametrize("has_device", [True, False])
def test_preflight_here_without_nvidia_smi_goes_by_the_device_as_run_does(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    has_device: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checks, "has_nvidia_device", lambda: has_device)
    monkeypatch.setenv("PATH", str(tmp_path))
    argv = ["preflight", "--inventory", "local", "--quick", "--json", "--set", "device.kind=cuda"]
    code = main(argv, os.environ)
    (node,) = json.loads(capsys.readouterr().out)["nodes"].values()
    assert code == (ExitCode.OK if has_device else ExitCode.PREFLIGHT)
    assert node["checks"]["gpu"] == ("-" if has_device else "error")


def test_a_warning_between_the_rows_is_passed_on(tmp_path: Path) -> None:
    said = "WARNING: infoROM is corrupted at gpu 0000:00:03.0"
    facts = ask(make_nvidia_smi(tmp_path, L4, L4, said=said))
    (found,) = faults(facts)
    assert found.severity == "warning" and said in found.cause


@pytest.mark.parametrize(
    ("visible", "indexes"),
    [
        (None, [0, 1, 2]),
        ("2,1", [2, 1]),
        ("0,2,-1,1", [0, 2]),
        ("GPU-00000001", [1]),
        ("GPU-0000", []),
        ("1,1", []),
        ("", []),
        ("NoDevFiles", []),
        ("7", []),
    ],
)
def test_cuda_visible_devices_leaves_what_cuda_would_see(
    tmp_path: Path, visible: str | None, indexes: list[int]
) -> None:
    facts = ask(make_nvidia_smi(tmp_path, A100, A100, A100), visible=visible)
    assert [gpu.index for gpu in facts.visible_devices()] == indexes
    if visible is not None:
        found = faults(facts, gpus=3, gpu_memory_gib=40.0)
        assert [fault.cause for fault in found] == [
            f"CUDA_VISIBLE_DEVICES = {visible!r} makes {len(indexes)} of its 3 GPU(s) visible, "
            "device.kind = 'cuda' requires 3"
        ]


def test_a_mig_instance_counts_as_a_device(tmp_path: Path) -> None:
    split = A100 | {"mig.mode.current": "Enabled"}
    facts = ask(make_nvidia_smi(tmp_path, split), visible="MIG-1c2d,MIG-3e4f")
    assert len(facts.visible_devices()) == 2 and faults(facts) == []


@pytest.mark.parametrize(
    ("settings", "gpus", "why", "number"),
    [
        ({}, (2, 2), "the inventory", 2),
        ({}, (2, 0), None, None),
        ({}, (), None, None),
        ({"device.kind": "cpu"}, (2,), None, None),
        # Ranks use NUMA domains if the inventory has no GPU count, and each rank uses a GPU.
        ({"device.kind": "cuda"}, (0,), "device.kind = 'cuda'", 4),
        ({"device.kind": "cuda", "launch.ranks_per_node": 3}, (0,), "device.kind = 'cuda'", 3),
        ({"device.kind": "cuda"}, (2, 1), "device.kind = 'cuda'", 2),
        ({"distributed.backend": "nccl"}, (0,), "distributed.backend = 'nccl'", 4),
        # `auto` uses the CPU if there are fewer GPUs than ranks.
        ({"launch.ranks_per_node": 3}, (2,), None, None),
        ({"launch.ranks_per_node": 1}, (2,), "the inventory", 1),
    ],
)
def test_gpus_are_needed_where_a_setting_or_every_node_of_the_inventory_says_so(
    settings: dict[str, Any], gpus: tuple[int, ...], why: str | None, number: int | None
) -> None:
    nodes = [
        replace(NODE, name=f"node-{i}", address=f"10.0.0.{i + 2}", gpus=count, numa_domains=4)
        for i, count in enumerate(gpus)
    ]
    inventory = replace(discover().inventory(), nodes=tuple(nodes))
    chosen = ResolvedInventory(inventory=inventory, why="test", domains={})
    config = parse_run_config(
        "", overrides=[f"{key}={value}" for key, value in settings.items()], where="test"
    )
    found = chosen.gpu_need(config)
    assert (found.why if found else None) == why
    assert (found.on(nodes[0]) if found else None) == number


def test_gpus_here_that_ranks_cannot_use_yet_count_for_what_a_run_needs(tmp_path: Path) -> None:
    """Otherwise the fault would be fewer GPUs than NUMA domains."""
    make_torch(make_nvidia_smi(tmp_path, L4 | {"driver_version": "535.183.01"}))
    node = replace(NODE, gpus=0, numa_domains=4)
    inventory = replace(discover().inventory(), nodes=(node,))
    chosen = ResolvedInventory(inventory=inventory, why="test", domains={}, nvidia=ask(tmp_path))
    need = chosen.gpu_need(parse_run_config("", overrides=["device.kind=cuda"], where="test"))
    assert need is not None and chosen.nvidia is not None and need.on(node) == 1
    (found,) = gpu_faults(chosen.nvidia, need=need, node=node)
    assert "its driver 535.183.01 is too old" in found.cause


def test_the_driver_that_nodes_get_runs_the_cuda_of_the_lock() -> None:
    assert least_driver_branch("13.0") == int(NVIDIA_DRIVER_BRANCH)
    assert least_driver_branch("9.2") is least_driver_branch("?") is None


def test_preflight_of_this_machine_has_a_gpu_row_only_where_gpus_are_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    smi = make_nvidia_smi(tmp_path / "bin", L4 | {"driver_version": "535.183.01"})
    monkeypatch.setenv("PATH", f"{smi}{os.pathsep}{os.environ['PATH']}")
    argv = ["preflight", "--inventory", "local", "--quick"]
    assert main([*argv, "--set", "device.kind=cpu"], os.environ) == ExitCode.OK
    assert "GPU" not in capsys.readouterr().out.split()
    main([*argv, "--set", "device.kind=cuda"], os.environ)
    assert "\nGPU          error\n" in capsys.readouterr().out
    code = main([*argv, "--json", "--set", "device.kind=cuda"], os.environ)
    printed = json.loads(capsys.readouterr().out)
    assert code == printed["exit_code"] == ExitCode.PREFLIGHT
    (node,) = printed["nodes"].values()
    assert node["checks"]["gpu"] == "error"
    # The torch of these tests is the CPU build.
    assert [found["check"] for found in printed["findings"] if found["severity"] == "error"] == [
        "gpu"
    ]
    assert any("1 x NVIDIA L4 (22.5 GiB), driver 535.183.01" in note for note in printed["notes"])


@pytest.mark.parametrize(
    ("gpu", "settings", "code", "words"),
    [
        (A100, {}, ExitCode.OK, "2 x NVIDIA A100-SXM4-40GB (40.0 GiB), driver 580.95.05, ECC on"),
        (
            A100 | {"driver_version": "535.183.01"},
            {"device.kind": "cuda"},
            ExitCode.CONFIG,
            "error: device.kind = 'cuda': this machine: its driver 535.183.01 is too old: torch "
            "2.13.0+cu130 (CUDA 13.0) needs branch 580 or later. Install NVIDIA's driver, branch "
            "580 (bootstrap/node-setup.sh does).",
        ),
        (
            A100,
            {"device.kind": "cuda", "launch.ranks_per_node": "2"},
            ExitCode.CONFIG,
            "CUDA_VISIBLE_DEVICES = '1' makes 1 of its 2 GPU(s) visible, device.kind = 'cuda' "
            "requires 2. Unset this variable on the node, or set launch.ranks_per_node = 1.",
        ),
        # It computes on the CPU, with a rank for each NUMA domain.
        (A100 | {"driver_version": "535.183.01"}, {}, ExitCode.OK, "driver 535.183.01"),
    ],
)
def test_a_plan_here_places_a_rank_on_each_visible_gpu_or_refuses_in_one_line(
    tmp_path: Path, gpu: dict[str, str], settings: dict[str, str], code: ExitCode, words: str
) -> None:
    # In a separate process: this one has loaded a torch without CUDA. A plan imports no torch.
    make_torch(tmp_path / "torch")
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError", encoding="ascii")
    path = [make_nvidia_smi(tmp_path / "bin", gpu, gpu), *os.environ["PATH"].split(os.pathsep)]
    env = {**os.environ, "PATH": os.pathsep.join(map(str, path)), "CUDA_VISIBLE_DEVICES": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(tmp_path)])
    command = [sys.executable, "-m", "payload.orchestrate", "plan", "--inventory=local", "--json"]
    done = subprocess.run(
        [*command, *(f"--set={key}={value}" for key, value in settings.items())],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == code and words in done.stderr, done.stderr
    if code == ExitCode.OK:
        inventory = json.loads(done.stdout)["inventory"]
        is_fit = "580" in gpu["driver_version"]
        assert inventory["nodes"][0]["gpus"] == is_fit
        assert inventory["nodes"][0]["gpu_memory_gib"] == (40.0 if is_fit else None)


def test_a_launcher_hands_cuda_visible_devices_to_its_ranks() -> None:
    kept = launcher_environment({"CUDA_VISIBLE_DEVICES": "1", "RANK": "7"}, {})
    assert kept == {"CUDA_VISIBLE_DEVICES": "1"}


@pytest.mark.ranks
def test_the_trial_of_a_run_on_gpus_starts_its_ranks_there_and_names_a_torch_without_cuda(
    tmp_path: Path,
) -> None:
    access = LocalAccess(os.environ)
    nodes = discover().inventory().nodes
    config = parse_run_config(
        "", overrides=["device.kind=cuda", "launch.ranks_per_node=1"], where="test"
    )
    trial = try_this_machine(nodes, access, tmp_path, config=config, domains={})
    # The torch of these tests is the CPU build.
    (found,) = trial.findings
    assert trial.on_gpus and trial.measured is None and found.check == "gpu"
    assert "its rank has no GPU: device.kind = 'cuda': torch" in found.cause
