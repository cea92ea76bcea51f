"""The tests' pretrained model is the published one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import smollm2

pytestmark = pytest.mark.processes

_FILES = {
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
}


def test_the_folder_has_the_published_sizes_and_a_chat_template() -> None:
    folder = smollm2.smollm2_folder()
    config = json.loads((folder / "config.json").read_bytes())

    assert {path.name for path in folder.iterdir()} == _FILES
    assert config["model_type"] == "llama"
    assert (config["num_hidden_layers"], config["hidden_size"]) == (30, 576)
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (9, 3)
    assert "<|im_start|>" in (folder / "chat_template.jinja").read_text(encoding="utf-8")


def test_the_tokenizer_cuts_numbers_into_digits() -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm2.smollm2_folder() / "tokenizer.json"))

    assert tokenizer.encode("In 1984").tokens == ["In", "Ġ", "1", "9", "8", "4"]
    assert tokenizer.token_to_id("<|im_end|>") == 2


def test_two_processes_make_a_folder_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    program = """
import time
from pathlib import Path
from tests.support import smollm2

def build(folder):
    with (folder.parent / "built").open("a") as file:
        file.write("x")
    time.sleep(0.2)
    (folder / "file").write_text("whole")

print((smollm2.kept("thing", build) / "file").read_text())
"""
    started = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) for _ in range(2)
    ]

    assert [each.communicate()[0] for each in started] == [b"whole\n"] * 2
    assert (smollm2.cache_dir() / "built").read_text() == "x"
