"""Builds the kernels' library once for its source, torch version and CPU, and caches it."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
from pathlib import Path

import torch

from payload.core.files import fsync_folder
from payload.kernels.code_caches import is_own_file, own_folder
from payload.kernels.unavailable import KernelsUnavailableError

SOURCES = ("attention.cpp", "decoder.cpp", "pointwise.cpp", "products.cpp", "update.cpp")
_HEADERS = ("brgemm.h", "common.h", "layout.h")
COMPILERS = ("g++", "clang++")

# No errno and no traps: they prevent vectorisation. NaN and infinity keep their meaning.
_FLAGS: tuple[str, ...] = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp",
    "-fPIC",
    "-shared",
)
if platform.machine() == "x86_64":
    # For AVX-512. By default gcc 12 uses only half of its width on Intel's CPUs.
    _FLAGS += ("-mprefer-vector-width=512",)
# Jump threading gives each side of a bound separate code, and a vectorised loop computes both for
# every lane. GELU then multiplied all of its input by the logistic function at its bound, 1e-38.
# The results were subnormal, which needs microcode, and its backward pass took 3 to 5 times as
# long, for the same bits. Only gcc has this option.
_GCC_FLAGS = ("-fno-thread-jumps",)
# Two seconds on the development machine, longer if many ranks start at the same time.
_TIMEOUT_S = 300


def built_library(cache: Path) -> Path:
    """Return the shared library in `cache`, building it if missing.

    Of several processes, one builds and the others wait for it. Raises KernelsUnavailableError.
    """
    if platform.system() != "Linux":
        raise KernelsUnavailableError(f"they need Linux, this machine has {platform.system()}")
    library = cache / f"kernels-{_fingerprint()}.so"
    try:
        own_folder(cache)
        if is_own_file(library):
            return library
        with (cache / "build.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not is_own_file(library):
                _compile(library)
    except OSError as error:
        raise KernelsUnavailableError(f"{cache} cannot be used: {error.strerror}") from None
    return library


def _compile(library: Path) -> None:
    """Build the library under a temporary name, then rename it: it is complete or absent."""
    compiler = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        raise KernelsUnavailableError("this machine has no C++ compiler (apt-get install g++)")
    folder, torch_libraries = Path(__file__).parent, Path(torch.__file__).parent / "lib"
    partial = library.with_suffix(f".{os.getpid()}.partial")
    flags = _FLAGS + (_GCC_FLAGS if Path(compiler).name == "g++" else ())
    command = [compiler, *flags, *(str(folder / name) for name in SOURCES), "-o", str(partial)]
    # The process has torch's libraries loaded: the library needs no path to them at run time.
    command += [f"-L{torch_libraries}", "-ltorch_cpu", "-lc10"]
    try:
        # Not in the user's folder: an empty entry of CPATH would search it for headers.
        done = subprocess.run(
            command,
            cwd=library.parent,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines()
            reason = next((line for line in lines if "error" in line), "no reason given")
            raise KernelsUnavailableError(f"{compiler} failed: {reason}")
        # Without fsync, a power cut could leave an empty library under its name.
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.chmod(0o700)
        partial.replace(library)
        fsync_folder(library.parent)
    except subprocess.TimeoutExpired:
        raise KernelsUnavailableError(f"{compiler} took over {_TIMEOUT_S} s") from None
    finally:
        partial.unlink(missing_ok=True)


def _fingerprint() -> str:
    """Return a hash of the machine code's inputs: different machines can share a home folder."""
    digest = hashlib.sha256()
    for name in (*SOURCES, *_HEADERS):
        digest.update((Path(__file__).parent / name).read_bytes())
    digest.update(" ".join((*_FLAGS, *_GCC_FLAGS, torch.__version__, platform.machine())).encode())
    digest.update("".join(_cpu_description()).encode())
    return digest.hexdigest()[:20]


def _cpu_description() -> list[str]:
    """Return the first CPU's model and instruction sets."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    first = lines[: lines.index("")] if "" in lines else lines
    return [line for line in first if line.startswith(("model", "flags", "Features"))]
