"""Machine code that another user has put into a cache folder of this user."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import pytest
from torch._inductor.runtime.cache_dir_utils import cache_dir

from payload.config.training_sections import EngineSection
from payload.kernels import build
from payload.kernels.build import built_library
from payload.kernels.code_caches import is_own_file, keep_inductor_home, own_folder
from payload.train.tensors import bitsandbytes_import
from payload.train.torch_engines import apply_engine
from tests.train.alone import ALONE

_SOMEBODY = 54321


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    # Set first, so that the test's own change is undone after it.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    return folder


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give `path` to another user than this process's and its home folder's."""
    if os.geteuid() == 0:
        os.chown(path, _SOMEBODY, _SOMEBODY)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: _SOMEBODY)
        monkeypatch.setenv("HOME", "/")


def test_compiled_code_is_looked_for_in_the_home_and_not_in_the_shared_temporary_folder(
    home: Path,
) -> None:
    model, optimizers = Mock(), Mock()
    model.layers.return_value = []
    apply_engine(model, optimizers, settings=EngineSection(compile=True), world=ALONE)
    model.compile.assert_called_once_with()
    own = home / ".cache" / "tileforge" / "inductor"
    assert (cache_dir(), own.stat().st_mode & 0o777) == (str(own), 0o700)


def test_the_quantizer_s_compiled_operations_are_kept_there_too(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", ModuleType("bitsandbytes"))
    bitsandbytes_import._imported.__wrapped__()
    assert cache_dir() == str(home / ".cache" / "tileforge" / "inductor")


def test_another_user_s_folder_is_not_used(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = home / ".cache" / "tileforge" / "inductor"
    theirs.mkdir(parents=True)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    give_away(theirs, monkeypatch)
    with pytest.raises(PermissionError, match="it belongs to another user"):
        own_folder(theirs)
    keep_inductor_home()
    used = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert (used.parent, used.stat().st_mode & 0o777) == (tmp_path, 0o700)


def test_a_folder_that_the_environment_names_is_taken(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/scratch/ada")
    keep_inductor_home()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/scratch/ada"


@pytest.mark.parametrize("planted", ["another user's", "writable"])
def test_kernels_that_another_user_may_have_written_are_built_again(
    planted: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = home / ".cache" / "tileforge" / "kernels"
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    library = cache / f"kernels-{build._fingerprint(build.KERNELS, build.target_flags(None))}.so"
    library.write_text("theirs")
    library.chmod(0o777)
    if planted != "writable":
        library.chmod(0o755)
        give_away(library, monkeypatch)
    assert not is_own_file(library)
    if os.geteuid() != _SOMEBODY:
        monkeypatch.setattr(build, "_compile", lambda path, *_: path.write_text("ours"))
        assert built_library(cache).read_text() == "ours"
        assert cache.stat().st_mode & 0o777 == 0o700
