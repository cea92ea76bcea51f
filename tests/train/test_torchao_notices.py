"""Notices of torchao, which transformers imports, reach neither a terminal nor a rank's log."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from payload.train.tensors.torchao_notices import hide_torchao_notices
from tests.support.launching import REPO

CONFIG = {
    "model_type": "gpt_neox",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 100,
}
IMPORTS = {
    "the transformers path": f"""
import logging
from payload.train.families.transformers.from_config import module_class, module_config
logging.basicConfig(level=logging.INFO)
module_class(module_config({CONFIG!r}, where="config.json", dropout=0.0))
""",
    "8-bit floats": """
from payload.train.models.float8 import _library
_library()
""",
}


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("program", IMPORTS.values(), ids=IMPORTS)
def test_an_import_of_torchao_prints_nothing(program: str) -> None:
    program += "\nimport sys\nassert any(name.startswith('torchao.') for name in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program],
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
