"""Access a run's store from the operator's machine: test writes, download data and runs."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from payload.config.run_config import RunConfig, load_run_config
from payload.config.store_address import (
    StoreAddress,
    is_bucket_address,
    parse_store_address,
    resolve_results_address,
)
from payload.core.errors import ConfigError, ExitCode, PreflightError, UsageError
from payload.core.files import make_shared
from payload.core.one_line import last_line
from payload.core.printable_text import shown
from payload.core.python_processes import code_environment, module_command
from payload.core.suggested_commands import command
from payload.core.validation.names import RUN_ID
from payload.run_record.approved_settings import record_approved
from payload.run_record.run_files import RunPaths
from payload.storage.data import fetch_data
from payload.storage.isolated_reader import watched_store
from payload.storage.objects import StoreReader
from payload.storage.restore import fetch_run

TRY_STORE_S = 60.0
"""Timeout for the test of a store."""
_END_S = 0.2
_WITHOUT = 'Or run without a store: --set storage.results="none".'


def is_address(text: str | None) -> bool:
    """Return True if `text` is the address of a run in a store instead of a run id."""
    return text is not None and text.startswith(("gs://", "/"))


def run_address(text: str) -> StoreAddress:
    """Parse the address of one run. Raises UsageError and ConfigError."""
    address = parse_store_address(text, setting="RUN")
    address = address.parent().under(address.last())
    if not RUN_ID.fullmatch(address.last()):
        raise UsageError(
            f"run {shown(text)}: its last part is not a run id. List the runs of a store: "
            + command("storage", "list", "gs://BUCKET/PREFIX")
        )
    return address


def resolve_results(config: RunConfig, *, bucket: str | None) -> RunConfig:
    """Return the config with `storage.results = "auto"` resolved for this bucket."""
    results = resolve_results_address(config.storage.results, bucket=bucket)
    return replace(config, storage=replace(config.storage, results=results))


def require_new_in_store(config: RunConfig, run_id: str, *, env: Mapping[str, str]) -> None:
    """Raise ConfigError or PreflightError if this machine cannot use a configured store for a new
    run."""
    results = config.storage.address()
    if results is not None:
        check_store_access(results, env=env, new_run=run_id)


def check_store_access(
    address: StoreAddress,
    *,
    env: Mapping[str, str],
    new_run: str | None = None,
    timeout_s: float = TRY_STORE_S,
) -> None:
    """Raise ConfigError or PreflightError if this machine cannot write to a store.

    Also raises ConfigError if the store already has the run `new_run`. The test runs in a separate
    process, because access to a stale mount hangs and cannot be interrupted.
    """
    process = subprocess.Popen(
        check_command(address, new_run=new_run),
        env=code_environment(env),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        _, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise PreflightError(
            f"{address} did not answer within {timeout_s:.0f} s. Check that the folder is mounted "
            f"and that its server runs. {_WITHOUT}"
        ) from None
    finally:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
    require_store_ok(process.returncode, stderr)


def check_command(
    address: StoreAddress, *, new_run: str | None, python: str = sys.executable
) -> list[str]:
    """Return the command line that tests a store."""
    run = [] if new_run is None else ["--new", new_run]
    return module_command("payload.storage", "check", *run, str(address), python=python)


def require_store_ok(status: int, stderr: bytes, *, where: str = "") -> None:
    """Raise ConfigError or PreflightError if the test of a store has failed."""
    if status == ExitCode.OK:
        return
    reason = last_line(stderr.decode(errors="replace"), otherwise="no reason given")
    message = where + reason
    if status == ExitCode.CONFIG:
        raise ConfigError(message)
    raise PreflightError(f"{message} {_WITHOUT}")


def fetch_data_to_cache(
    config: RunConfig, *, env: Mapping[str, str], say: Callable[[str], None]
) -> None:
    """Download data from a bucket to this machine's cache. Raises DataError and StoreError."""
    if is_bucket_address(config.data.dir):
        address = parse_store_address(config.data.dir, setting="data.dir")
        with watched_store(address, env=env, say=say) as store:
            fetch_data(store, config.data.folder(), say=say)


def stored_at(paths: RunPaths) -> StoreAddress | None:
    """Return the address of a run's results from the run's settings, or None without a store."""
    with suppress(ConfigError):
        address = load_run_config(paths.config).storage.address()
        return None if address is None else address.under(paths.run_id)
    return None


def fetch_run_atomically(store: StoreReader, paths: RunPaths) -> None:
    """Atomically create the run's folder with the records that a resume reads.

    If another process creates the folder first, that folder is kept.
    """
    runs_dir = paths.root.parent
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{paths.run_id}.", dir=runs_dir))
    except OSError as error:
        raise ConfigError(
            f"{runs_dir}: {error.strerror}. Choose a writable folder with --runs-dir."
        ) from None
    try:
        fetch_run(store, RunPaths(staging))
        named = {"storage.results": str(store.address.parent())}
        record_approved(RunPaths(staging), named, becomes=paths.root)
        make_shared(staging)
        try:
            staging.rename(paths.root)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise ConfigError(f"{paths.root}: {error.strerror}.") from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)
