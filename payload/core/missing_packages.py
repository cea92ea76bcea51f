"""A missing package: the error that names the environment to activate or the extra to install."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

from payload.core.errors import BootstrapError
from payload.core.suggested_commands import quoted

_DISTRIBUTION = "tileforge-train"
_SET_UP = Path("bootstrap", "install-payload.sh")
_STAMP = ".tileforge-setup"
"""Name of the file with which set-up marks the environments that it makes."""
_OTHER_NAMES = {"sklearn": "scikit-learn", "oneccl_bindings_for_pytorch": "oneccl-bind-pt"}
"""Package names by module name, for packages with a different module name."""


def explain_missing_packages() -> None:
    """Report a missing package of this process in one line, instead of with a traceback.

    The `__main__` of each program calls this function before its other imports.
    """
    sys.excepthook = _show


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    explained = missing_package_error(error)
    if explained is None:
        sys.__excepthook__(kind, error, trace)
        return
    sys.stderr.write(f"error: {explained}\n")
    sys.exit(explained.exit_code)


def missing_package_error(error: BaseException) -> BootstrapError | None:
    """Return the error to show for a failed import, or None if its cause is not a missing
    package."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    top = (name or "").partition(".")[0]
    if name is None or top in sys.stdlib_module_names or top in ("", "payload", "infra"):
        return None
    if _is_installed(top):
        return None
    root = Path(__file__).resolve().parents[2]
    return BootstrapError(
        f"the package {top} is not installed for {sys.executable}",
        fix=_fix(name, root=root, cwd=Path.cwd(), prefix=Path(sys.prefix)),
    )


def _is_installed(top: str) -> bool:
    """Return True if Python finds the package.

    If the package is installed, the import failed because of a missing module or a wrong version of
    the package. A namespace such as `google` does not count, because several packages share it.
    """
    # find_spec raises ValueError for a module without a spec.
    with suppress(ImportError, ValueError):
        spec = find_spec(top)
        return spec is not None and spec.origin is not None
    return False


def _fix(name: str, *, root: Path, cwd: Path, prefix: Path) -> str:
    """Return what makes the module `name` available.

    `root` is the parent folder of `payload`, `prefix` the folder of this Python's environment.
    """
    environment = root / ".venv"
    is_active = prefix.resolve() == environment.resolve()
    activate = f"source {_shown(environment / 'bin' / 'activate', cwd)}"
    if not is_active and _has_module(environment, name):
        return f"Activate the environment: {activate}"
    extra = _extra_of(name, _requirements(root))
    subject = f"Install the extra {extra}" if extra else "Set up the environment"
    if not (root / _SET_UP).is_file():
        return f"{subject}: pip install '{_DISTRIBUTION}[{extra or 'train'}]'"
    if not is_active and (prefix / _STAMP).is_file():
        options = f"--venv {quoted(str(prefix))} --extras {extra or 'train,orchestrate'}"
        return f"{subject}: bash {_shown(root / _SET_UP, cwd)} {options}"
    folder = "" if root == cwd.resolve() else f" -C {_shown(root, cwd)}"
    return f"{subject}: make{folder} setup" + ("" if is_active else f" && {activate}")


def _shown(path: Path, cwd: Path) -> str:
    """Return the shorter of the absolute and the relative path, quoted."""
    return quoted(min(str(path), os.path.relpath(path, cwd), key=len))


def _has_module(environment: Path, name: str) -> bool:
    """Return True if the folder of an environment contains the module, for any Python version."""
    path = name.replace(".", "/")
    return any(environment.glob(f"lib/python*/site-packages/{path}*"))


def _requirements(root: Path) -> Mapping[str, Sequence[str]]:
    """Return the requirements of each extra; empty if this package states none."""
    # Not at the top: every program imports this module, and few need these two.
    import importlib.metadata
    import tomllib

    with suppress(OSError, ValueError, KeyError):
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        if project["name"] == _DISTRIBUTION:
            found: Mapping[str, Sequence[str]] = project["optional-dependencies"]
            return found
    extras: dict[str, list[str]] = {}
    with suppress(importlib.metadata.PackageNotFoundError):
        for requirement in importlib.metadata.requires(_DISTRIBUTION) or ():
            if of := re.search(r"extra == [\"']([^\"']+)", requirement):
                extras.setdefault(of[1], []).append(requirement)
    return extras


def _extra_of(name: str, requirements: Mapping[str, Sequence[str]]) -> str | None:
    """Return the first extra that requires the module's package; None if no extra requires the
    package."""
    top = name.partition(".")[0]
    wanted = re.sub(r"[-_.]+", "-", _OTHER_NAMES.get(top, top)).lower()
    for extra, packages in requirements.items():
        names = (re.sub(r"[-_.]+", "-", _name_of(package)).lower() for package in packages)
        # Google's libraries share the module `google`.
        if any(each == wanted or (wanted == "google" and each[:7] == "google-") for each in names):
            return "train" if extra == "trainer" else extra
    return None


def _name_of(requirement: str) -> str:
    """Return the name of a package in a requirement such as `rich>=15,<16`."""
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
