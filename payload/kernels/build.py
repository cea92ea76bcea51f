"""Builds the kernels' library once for each source, torch version and CPU, and caches it."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from payload.core.files import fsync_folder
from payload.kernels.code_caches import is_own_file, own_folder
from payload.kernels.unavailable import KernelsUnavailableError
from payload.machines.machine_facts import INSTALL_COMPILER, find_compiler

SOURCES = (
    "attention.cpp",
    "attention_fp32.cpp",
    "decoder.cpp",
    "decoder_fp32.cpp",
    "delta_rule.cpp",
    "delta_rule_fp32.cpp",
    "instructions.cpp",
    "loss.cpp",
    "pointwise.cpp",
    "pointwise_fp32.cpp",
    "products.cpp",
    "short_convolution.cpp",
    "short_convolution_fp32.cpp",
    "tile_gradients.cpp",
    "update.cpp",
)
_HEADERS = (
    "activations.h",
    "attention_shape.h",
    "brgemm.h",
    "chunk_products.h",
    "common.h",
    "element.h",
    "layout.h",
    "products_fp32.h",
    "tile_gradients.h",
    "tiles.h",
)
KERNELS = tuple(Path(__file__).parent / each for each in SOURCES)

ISA = "TILEFORGE_CPU_ISA"
"""The environment variable that limits the instruction set of the kernels."""
# The levels of x86-64 with AVX2 and with AVX-512. A CPU below the level lacks the flag of
# /proc/cpuinfo.
_LEVELS = {"avx2": ("x86-64-v3", "avx2"), "avx512": ("x86-64-v4", "avx512vl")}

# errno and floating-point traps would prevent vectorisation. NaN and infinity still work.
_FLAGS: tuple[str, ...] = (
    "-std=c++17",
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp",
    "-fPIC",
)
_NATIVE = ("-march=native",)
if platform.machine() == "aarch64":
    # Older clang refuses -march=native on Arm.
    _NATIVE = ("-mcpu=native",)
if platform.machine() == "x86_64":
    # By default, gcc 12 uses only half the width of AVX-512 on Intel's CPUs.
    _FLAGS += ("-mprefer-vector-width=512",)
# Jump threading generates separate code for each side of a bound, and a vectorised loop computes
# both sides for every lane. GELU therefore multiplied all inputs by the value of the logistic
# function at its bound, 1e-38. The results were subnormal, which needs microcode, so GELU's
# backward function took 3 to 5 times as long for the same result. Only gcc has this option.
_GCC_FLAGS = ("-fno-thread-jumps",)
# A file takes seconds on the development machine, and minutes on a busy one.
# Ranks whose build exceeds this limit would train without kernels.
_TIMEOUT_S = 1200


def default_cache() -> Path:
    """Return the folder in this user's home that keeps the built libraries."""
    return Path.home() / ".cache" / "tileforge" / "kernels"


def built_library(
    cache: Path,
    *,
    name: str = "kernels",
    sources: Sequence[Path] = KERNELS,
    isa: str | None = None,
) -> Path:
    """Return the shared library in `cache`, building it if missing.

    `sources` replace the kernels' sources, and may include the kernels' headers. The library's file
    name begins with `name`. `isa` limits the instruction set; None = all instructions of this CPU.
    If several processes call this, one builds and the others wait. Raises KernelsUnavailableError.
    """
    if platform.system() != "Linux":
        raise KernelsUnavailableError(f"they need Linux, this machine has {platform.system()}")
    flags = target_flags(isa)
    library = cache / f"{name}-{_fingerprint(sources, flags)}.so"
    try:
        own_folder(cache)
        if is_own_file(library):
            return library
        with (cache / "build.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not is_own_file(library):
                _compile(library, sources, flags)
    except OSError as error:
        raise KernelsUnavailableError(f"{cache} cannot be used: {error.strerror}") from None
    return library


def target_flags(isa: str | None) -> tuple[str, ...]:
    """Return the compiler's flags for this CPU, with instructions limited to the level `isa`.

    A level above the CPU's own level has no effect. Raises KernelsUnavailableError for an unknown
    level.
    """
    if not isa:
        return _NATIVE
    if isa not in _LEVELS:
        raise KernelsUnavailableError(f"{ISA} = {isa}: must be {' or '.join(_LEVELS)}")
    target, needed = _LEVELS[isa]
    flags = {flag for line in _cpu_description() for flag in line.split()}
    if needed not in flags:
        return _NATIVE
    return (f"-march={target}", "-DTILEFORGE_WITHOUT_BF16")


def _compile(library: Path, sources: Sequence[Path], target: Sequence[str]) -> None:
    """Compile the sources in parallel, and link them to `library` atomically."""
    compiler = find_compiler()
    if compiler is None:
        raise KernelsUnavailableError(f"this machine has no C++ compiler ({INSTALL_COMPILER})")
    flags = (*_FLAGS, *target) + (_GCC_FLAGS if Path(compiler).name == "g++" else ())
    torch_folder = Path(torch.__file__).parent
    with TemporaryDirectory(dir=library.parent, prefix="build-") as folder:

        def compile_one(source: Path) -> str:
            output = str(Path(folder, source.name).with_suffix(".o"))
            # The allocator alone includes headers of torch.
            command = [compiler, *flags, "-c", f"-I{torch_folder / 'include'}", str(source)]
            _run_compiler([*command, "-o", output], folder)
            return output

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            objects = list(pool.map(compile_one, sources))
        partial = Path(folder, library.name)
        # The process has already loaded torch's libraries, so the library needs no path to them.
        libraries = [f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10"]
        link = [compiler, *flags, "-shared", *objects, "-o", str(partial), *libraries]
        _run_compiler(link, folder)
        # Without fsync, a power failure could leave an empty file under the library's name.
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.chmod(0o700)
        partial.replace(library)
        fsync_folder(library.parent)


def _run_compiler(command: Sequence[str], folder: str) -> None:
    """Run the compiler in `folder`. Raises KernelsUnavailableError with the compiler's first error.

    The compiler does not run in the user's folder: with an empty entry in CPATH, it would search
    this folder for headers.
    """
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise KernelsUnavailableError(f"{command[0]} took over {_TIMEOUT_S} s") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        reason = next((line for line in lines if "error" in line), "no reason given")
        raise KernelsUnavailableError(f"{command[0]} failed: {reason}")


def _fingerprint(sources: Sequence[Path], target: Sequence[str]) -> str:
    """Return a hash of all inputs of the build, because machines may share a home folder."""
    digest = hashlib.sha256()
    for path in (*sources, *(Path(__file__).parent / each for each in _HEADERS)):
        digest.update(path.read_bytes())
    flags = (*_FLAGS, *target, *_GCC_FLAGS)
    digest.update(" ".join((*flags, torch.__version__, platform.machine())).encode())
    digest.update("".join(_cpu_description()).encode())
    return digest.hexdigest()[:20]


def _cpu_description() -> list[str]:
    """Return the first CPU's model and instruction sets."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    first = lines[: lines.index("")] if "" in lines else lines
    named = ("model", "flags", "Features", "CPU implementer", "CPU part")
    return [line for line in first if line.startswith(named)]
