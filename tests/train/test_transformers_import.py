"""A rank with transformers' layers does only the parts of transformers' import that it needs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.launching import REPO

CONFIG = {
    "model_type": "gpt_neox",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 100,
}
PROGRAM = f"""
import json, pathlib, sys
from payload.train.families.transformers.from_config import module_class, module_config

opened = []
sys.addaudithook(lambda event, given: opened.append(given[0]) if event == "open" else None)
config = module_config({CONFIG!r}, where="config.json", dropout=0.0)
kind = module_class(config)

import transformers
from transformers import GPTNeoXForCausalLM, utils
from transformers.utils import import_utils

scanned = pathlib.Path(transformers.__file__).parent / "models" / "olmo" / "modeling_olmo.py"
checks, places = ("is_scipy_available", "is_torchao_available"), (utils, import_utils)
print(json.dumps({{
    "imported": sorted({{"scipy", "sklearn", "torchao"}} & set(sys.modules)),
    "scans": opened.count(str(scanned)),
    "is_its_class": kind is GPTNeoXForCausalLM,
    "restored": all(getattr(each, name).__name__ == name for each in places for name in checks),
}}))
"""


@pytest.mark.slow
@pytest.mark.processes
def test_a_model_class_is_imported_without_packages_of_other_tasks() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=REPO, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    assert json.loads(done.stdout) == {
        "imported": [],
        "scans": 1,
        "is_its_class": True,
        "restored": True,
    }
