"""Runs processes with AMX on a machine whose CPU lacks it.

An emulated tile instruction takes microseconds, other instructions run natively: use this for
results, not for timings.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

_HERE = Path(__file__).parent
_FLAGS = [
    "-std=gnu11",
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
    "-shared",
    "-fPIC",
]
_TOOLS = ("gcc", "nm", "objdump")
# The functions in which oneDNN queries the CPU's features.
_ASKING = re.compile(r"(Xbyak::util::Cpu|dnnl::impl::cpu::x64::amx)::[^:]*\(")
# objdump reads the whole symbol table for every range that it disassembles.
_NEAR_BYTES = 1 << 20


def missing() -> str | None:
    """Return why the emulation is not needed or possible on this machine, or None."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return "this is not Linux on x86-64"
    flags = set(re.findall(r"\w+", _cpu_flags()))
    if "amx_tile" in flags:
        return "this CPU has tiles, and the tests of the kernels used them"
    if "avx512_bf16" not in flags:
        return "without AVX-512 and bf16 there are no kernels for products"
    absent = [tool for tool in _TOOLS if shutil.which(tool) is None]
    return f"no {' and no '.join(absent)} (apt-get install gcc binutils)" if absent else None


@dataclass(frozen=True)
class Emulation:
    """The emulator's built libraries, and their data about the installed torch."""

    folder: Path

    def environment(self, *, counts: Path | None = None) -> dict[str, str]:
        """Return this process's environment with tiles; counts are added to the file `counts`."""
        added = {
            "LD_PRELOAD": str(self.folder / "emulator.so"),
            "LD_AUDIT": str(self.folder / "overwrite.so"),
            "TILEFORGE_AMX_SITES": str(self.folder / "sites"),
        }
        if counts is not None:
            added["TILEFORGE_AMX_COUNTS"] = str(counts)
        return {**os.environ, **added}


def prepare(folder: Path) -> Emulation:
    """Build the emulator into `folder`, and search torch's library for the code to overwrite."""
    # A signal handler must not allocate, as a first use of thread-local memory can.
    _build("emulator.c", folder, "-ftls-model=initial-exec")
    _build("overwrite.c", folder)
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    sites = [f"{site:x}" for site in _sites(library)]
    if not sites:
        raise RuntimeError(f"{library}: nm lists no function of oneDNN's that asks for tiles")
    (folder / "sites").write_text("\n".join(sites) + "\n", encoding="ascii")
    return Emulation(folder)


def read_counts(path: Path) -> Counter[str]:
    """Return the executed instructions of all processes by kind, scalar products included."""
    total: Counter[str] = Counter()
    if path.exists():
        for line in path.read_text(encoding="ascii").splitlines():
            total.update(json.loads(line))
    return total


def _cpu_flags() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line for line in lines if line.startswith("flags")), "")


def _build(source: str, folder: Path, *flags: str) -> None:
    to = (folder / source).with_suffix(".so")
    subprocess.run(["gcc", *_FLAGS, *flags, _HERE / source, "-o", to, "-ldl"], check=True)


def _sites(library: Path) -> list[int]:
    """Return the offsets of `cpuid` and `xgetbv` in the functions that detect tiles."""
    symbols = _output("nm", "--demangle", "--print-size", "--defined-only", library)
    functions = []
    for line in symbols.splitlines():
        address, size, kind, name = (*line.split(" ", 3), "", "")[:4]
        if kind in "tTwW" and _ASKING.match(name):
            functions.append(range(int(address, 16), int(address, 16) + int(size, 16)))
    found = []
    for part in _joined(functions):
        bounds = f"--start-address={part.start}", f"--stop-address={part.stop}"
        code = _output("objdump", "--disassemble", "--no-show-raw-insn", *bounds, library)
        places = re.findall(r"^\s*([0-9a-f]+):\s+(?:cpuid|xgetbv)\b", code, re.MULTILINE)
        found += [int(place, 16) for place in places]
    return [site for site in found if any(site in function for function in functions)]


def _joined(functions: Iterable[range]) -> list[range]:
    """Merge ranges that are near each other."""
    parts: list[range] = []
    for each in sorted(functions, key=lambda function: function.start):
        if parts and each.start - parts[-1].stop < _NEAR_BYTES:
            parts[-1] = range(parts[-1].start, max(parts[-1].stop, each.stop))
        else:
            parts.append(each)
    return parts


def _output(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
