"""Facts read from /proc/cpuinfo of Arm servers, and decisions on Arm."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import harness
from payload.core.errors import PreflightError
from payload.kernels import build
from payload.launch.launchers.registry import AUTO
from payload.machines.core_speed import cpu_class, has_bf16, table_source
from payload.machines.machine_facts import instructions_of, read_cpu, read_machine_facts
from payload.orchestrate.machine_profiles.cluster_profile import fitting_launcher
from payload.orchestrate.machine_profiles.local_profile import LocalAccess
from payload.orchestrate.machine_profiles.offline_plan import dry_run_access
from payload.orchestrate.runs.launcher_choice import choose_launcher
from tests.launch.inventories import make_inventory
from tests.support.arm_cpuinfo import ARM_CPUINFO

NAMES = {
    "Graviton 3": "Arm Neoverse-V1",
    "Axion": "Arm Neoverse-V2",
    "Altra": "Arm Neoverse-N1",
}
X86_FLAG = ("avx", "amx", "AVX", "AMX")
CROSS_COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64-static"


@pytest.fixture(params=ARM_CPUINFO)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """Return an Arm server's name and its /proc/cpuinfo."""
    (tmp_path / "cpuinfo").write_text(ARM_CPUINFO[request.param], encoding="ascii")
    return request.param, tmp_path / "cpuinfo"


def test_an_arm_server_is_known_by_its_core_its_class_and_its_instructions(
    server: tuple[str, Path],
) -> None:
    name, cpuinfo = server
    cpu, flags = read_cpu(cpuinfo)
    assert cpu == NAMES[name]
    with_bf16 = name != "Altra"
    assert cpu_class(flags) == ("arm_bf16" if with_bf16 else "arm")
    assert instructions_of(flags) == (("bf16", "SVE") if with_bf16 else ("NEON",))
    assert has_bf16(cpuinfo) is with_bf16
    facts = read_machine_facts(path="", proc_root=cpuinfo.parent)
    assert facts.cpu == NAMES[name]


def test_an_unknown_arm_core_is_named_by_its_numbers(tmp_path: Path) -> None:
    text = ARM_CPUINFO["Altra"].replace("0xd0c", "0xfff")
    (tmp_path / "cpuinfo").write_text(text, encoding="ascii")
    assert read_cpu(tmp_path / "cpuinfo")[0] == "Arm implementer 0x41 part 0xfff"


def test_a_plan_on_arm_takes_arm_s_row_of_the_table(
    server: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, cpuinfo = server
    profile = "payload.orchestrate.machine_profiles.local_profile"
    monkeypatch.setattr(f"{profile}.read_cpu", lambda _path: read_cpu(cpuinfo))
    monkeypatch.setattr(f"{profile}.has_bf16", lambda: has_bf16(cpuinfo))
    found = LocalAccess(os.environ)
    assert found.speed_source() == table_source(cpu_class(read_cpu(cpuinfo)[1]))
    assert "Arm" in found.speed_source()
    assert not [word for word in X86_FLAG if word in found.speed_source()]
    assert found.dtype("auto") == ("fp32" if name == "Altra" else "bf16")
    assert found.core_flops_per_s("fp32") <= found.core_flops_per_s("bf16") or name == "Altra"


def test_auto_starts_the_ranks_of_an_arm_cluster_by_torchrun() -> None:
    profile = replace(
        dry_run_access(make_inventory(num_nodes=2), None, run_id="one"),
        architectures=frozenset({"aarch64"}),
    )
    choice = choose_launcher(AUTO, profile)
    assert choice.launcher.name == "torchrun" == fitting_launcher(AUTO, {"aarch64"}).name
    assert "Intel MPI runs on x86-64 Linux only" in choice.notes()[0]
    for mixed in ({"aarch64"}, {"aarch64", "x86_64"}):
        with pytest.raises(PreflightError, match="this is linux on aarch64"):
            fitting_launcher("mpirun", mixed)
    assert fitting_launcher(AUTO, {"x86_64"}).name == "mpirun"


def test_kernels_for_two_kinds_of_arm_cores_have_different_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A home folder can be shared by machines whose cores differ only in their part number."""
    names = set()
    for part in ("0xd4f", "0xd49"):
        lines = ARM_CPUINFO["Axion"].replace("0xd4f", part)
        monkeypatch.setattr(Path, "read_text", lambda *_, text=lines, **__: text)
        names.add(build._fingerprint([], ("-mcpu=native",)))
    assert len(names) == 2


def test_a_benchmark_s_page_names_the_arm_core(
    server: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, cpuinfo = server
    monkeypatch.setattr(harness, "read_cpu", lambda _path: read_cpu(cpuinfo))
    assert harness.describe_machine().endswith(f" cores, {NAMES[name]}")


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(not shutil.which(CROSS_COMPILER), reason=f"needs {CROSS_COMPILER}")
@pytest.mark.parametrize("target", ["armv8-a", "armv8.4-a+sve+bf16+i8mm"])
def test_the_kernels_compile_for_arm(target: str) -> None:
    flags = ["-std=c++17", "-fopenmp", "-fsyntax-only", f"-march={target}"]
    subprocess.run([CROSS_COMPILER, *flags, *build.KERNELS], check=True)


MAIN = """
#include <cstdio>
extern "C" const char* tileforge_missing_instructions();
int main() {
  const char* missing = tileforge_missing_instructions();
  std::puts(missing ? missing : "none");
}
"""


@pytest.mark.processes
@pytest.mark.skipif(
    not (shutil.which(CROSS_COMPILER) and shutil.which(EMULATOR)),
    reason=f"needs {CROSS_COMPILER} and {EMULATOR}",
)
def test_kernels_name_the_instructions_that_an_arm_cpu_lacks(tmp_path: Path) -> None:
    (tmp_path / "main.cpp").write_text(MAIN, encoding="ascii")
    source = Path(build.__file__).parent / "instructions.cpp"
    found = {}
    for target in ("armv8-a", "armv8.4-a+sve+bf16+i8mm"):
        program = tmp_path / target
        command = [CROSS_COMPILER, "-std=c++17", "-O3", "-static", f"-march={target}"]
        subprocess.run([*command, tmp_path / "main.cpp", source, "-o", program], check=True)
        for cpu in ("cortex-a57", "neoverse-n1", "max"):
            ran = [EMULATOR, "-cpu", cpu, str(program)]
            found[target, cpu] = subprocess.check_output(ran, text=True).strip()
    assert list(found.values()) == [*["none"] * 3, "atomics", "sve", "none"]


def test_the_compiler_s_flags_on_arm_name_no_instruction_set_of_x86(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    # The flags are constants of the module, so a copy of the module is loaded.
    spec = importlib.util.spec_from_file_location("build_on_arm", build.__file__)
    assert spec and spec.loader
    on_arm = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(on_arm)
    flags = (*on_arm._FLAGS, *on_arm.target_flags(None))
    assert "-mcpu=native" in flags
    assert not [flag for flag in flags if flag.startswith(("-march", "-mprefer"))]
