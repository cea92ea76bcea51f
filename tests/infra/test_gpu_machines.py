"""Machines with GPUs: their quotas, and the step of node-setup.sh that installs the driver."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Literal

import pytest

from payload.stack.cloud_requirements import CloudRequirements

SETUP = Path(__file__).resolve().parents[2] / "bootstrap" / "node-setup.sh"
_KERNEL = "6.8.0-1021-gcp"
_DRIVERS = (
    f"linux-modules-nvidia-570-server-open-{_KERNEL}",
    "nvidia-headless-no-dkms-570-server-open",
    "nvidia-utils-570-server",
)


@pytest.mark.parametrize(
    ("spot", "metrics"),
    [
        ("false", ["NVIDIA_L4_GPUS"]),
        ("true", ["PREEMPTIBLE_NVIDIA_L4_GPUS"]),
        ("auto", ["PREEMPTIBLE_NVIDIA_L4_GPUS", "NVIDIA_L4_GPUS"]),
    ],
)
def test_a_cluster_needs_the_quotas_of_all_its_gpus(
    spot: Literal["false", "true", "auto"], metrics: list[str]
) -> None:
    need = CloudRequirements(machine_type="g2-standard-24", node_count=3, spot=spot)
    found = [each for each in need.quotas(vcpus_per_node=24) if "GPUS" in each[1][0]]
    assert found == [
        *(("region", (metric,), 6.0) for metric in metrics),
        ("project", ("GPUS_ALL_REGIONS",), 6.0),
    ]


def test_machines_without_gpus_need_no_quota_of_them() -> None:
    wanted = CloudRequirements(machine_type="c3-standard-22").quotas(vcpus_per_node=22)
    assert not [each for each in wanted if "GPU" in each[1][0]]


@pytest.mark.processes
def test_a_gpu_s_driver_is_installed_for_the_running_kernel_once_and_held(tmp_path: Path) -> None:
    first, said = install_driver(tmp_path)
    assert first == [
        "apt-get -qq --no-install-recommends -o DPkg::Lock::Timeout=600 -o Acquire::Retries=3 "
        f"install -y {' '.join(_DRIVERS)}",
        f"apt-mark hold {' '.join(_DRIVERS)}",
        "modprobe nvidia",
        "nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader",
    ]
    assert said == ""
    again, _ = install_driver(tmp_path, installed=_DRIVERS)
    assert again == first[1:]


@pytest.mark.processes
def test_a_machine_without_a_gpu_gets_no_driver(tmp_path: Path) -> None:
    assert install_driver(tmp_path, branch="") == ([], "")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("failing", "reason"),
    [
        ("install", f"NVIDIA's driver could not be installed for kernel {_KERNEL}"),
        ("modprobe", "the kernel could not load NVIDIA's module; check: dmesg"),
        ("nvidia-smi", "nvidia-smi shows no GPU; check: dmesg"),
    ],
)
def test_a_driver_that_does_not_come_up_fails_the_set_up_with_the_reason(
    tmp_path: Path, failing: str, reason: str
) -> None:
    called, said = install_driver(tmp_path, failing=failing)
    assert failing in called[-1]
    assert f"driver: error: {reason}" in said


def install_driver(
    folder: Path, *, branch: str = "570", installed: tuple[str, ...] = (), failing: str = "none"
) -> tuple[list[str], str]:
    """Run the step with fake system programs; return their calls and errors."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    log = folder / "calls"
    log.write_text("")
    for name in ("apt-get", "apt-mark", "modprobe", "nvidia-smi"):
        words = f'[[ "{name} $*" != *{failing}* ]]'
        program = f'#!/usr/bin/env bash\necho "{name} $*" >>{log}\n{words}\n'
        (programs / name).write_text(program)
        (programs / name).chmod(0o755)
    (programs / "uname").write_text(f"#!/usr/bin/env bash\necho {_KERNEL}\n")
    (programs / "dpkg-query").write_text(
        "#!/usr/bin/env bash\n"
        f'[[ " {" ".join(installed)} " != *" ${{!#}} "* ]] || echo -n "install ok installed"\n'
    )
    for name in ("uname", "dpkg-query"):
        (programs / name).chmod(0o755)
    code = (
        f"NVIDIA_DRIVER={branch}\nstep=driver\n"
        "pause_apt_jobs() { :; }\nresume_apt_jobs() { :; }\nupdate_lists() { :; }\nstep_driver\n"
    )
    script = folder / "node-setup.sh"
    whole = SETUP.read_text(encoding="utf-8")
    script.write_text(whole.replace('\nmain "$@"\n', "\n" + code), encoding="utf-8")
    done = subprocess.run(
        ["bash", str(script)],
        env=os.environ | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == (30 if failing != "none" else 0), done.stderr
    return log.read_text().splitlines(), done.stderr
