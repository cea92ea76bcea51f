"""Imports transformers' shared modules, without packages that language models do not need."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

_UNUSED = (
    "is_scipy_available",  # losses of object detection
    "is_torchao_available",  # torchao's own format of quantised weights
)
"""transformers' checks for packages that it would import with its first model class."""


@cache
def import_shared_modules() -> None:
    """Import transformers' shared modules as if the packages of `_UNUSED` were not installed.

    Call this function before any other import of transformers. The call saves each rank 1.3 of 4.5
    s of CPU time. Modules that are imported later find all installed packages.
    """
    from transformers import utils
    from transformers.utils import import_utils

    missing = dict.fromkeys(_UNUSED, _is_missing)
    scan = {"create_import_structure_from_path": _scan_once(import_utils)}
    with _replaced(utils, missing), _replaced(import_utils, {**missing, **scan}):
        import transformers.modeling_utils  # noqa: F401


def _is_missing(*_minimum_version: str) -> bool:
    return False


def _scan_once(import_utils: ModuleType) -> Callable[[Any], Any]:
    """Return transformers' function for scanning a package's files, changed to scan models once.

    transformers scans its folder of models when it is imported. Later, transformers scans the
    folder again under the path of __init__.py, because the cache of the function treats this path
    as a different package.
    """
    scan: Callable[[Any], Any] = import_utils.create_import_structure_from_path
    folder = Path(str(import_utils.__file__)).parents[1] / "models"
    package = str(folder / "__init__.py")
    return lambda path: scan(folder if path == package else path)


@contextmanager
def _replaced(module: ModuleType, functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Replace functions of a module in this block."""
    before = {name: getattr(module, name) for name in functions}
    for name, function in functions.items():
        setattr(module, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(module, name, function)
