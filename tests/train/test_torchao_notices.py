"""Notices of torchao, which `precision.fp8` imports, reach neither a terminal nor a rank's log."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from payload.train.tensors.torchao_notices import hide_torchao_notices
from tests.support.launching import REPO

PROGRAM = """
import logging, sys
from payload.train.models.float8 import _library
logging.basicConfig(level=logging.INFO)
_library()
assert any(name.startswith("torchao.") for name in sys.modules)
"""


@pytest.mark.slow
@pytest.mark.processes
def test_an_import_of_torchao_prints_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("", "")


def test_other_warnings_of_the_same_loggers_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    hide_torchao_notices()
    logging.getLogger("torch.utils._pytree").warning("Overwriting the previous registration")
    logging.getLogger("torchao").warning("Failed to load the kernels of this device")
    assert len(caplog.records) == 2
