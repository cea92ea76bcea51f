"""Rules of the whole tree: allowed imports, and text that must never be committed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest

from tests.support.family_names import family_names
from tests.support.import_rules import LOWER, PACKAGES, RULES, unpickling, violations

ROOT = Path(__file__).resolve().parents[1]


def source_files() -> list[Path]:
    """Return every Python file that the import table covers."""
    return sorted(path for top in ("payload", "infra") for path in (ROOT / top).rglob("*.py"))


def repository_files() -> list[Path]:
    """Return tracked and untracked files; without git, all except environments and caches."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode == 0:
        names = listed.stdout.decode().rstrip("\0").split("\0")
        return [path for name in names if (path := ROOT / name).is_file()]
    left_out = {"data", "runs"}
    return [
        path
        for path in ROOT.rglob("*")
        if path.is_file()
        and path.relative_to(ROOT).parts[0] not in left_out
        and not any(part == "__pycache__" or part.startswith(".venv") for part in path.parts)
    ]


@pytest.mark.parametrize("path", source_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_keeps_to_the_import_table(path: Path) -> None:
    relative = PurePosixPath(path.relative_to(ROOT).as_posix())
    assert violations(relative, path.read_text(encoding="utf-8")) == []


def test_every_package_has_a_row_in_the_table() -> None:
    packages = {path.parent.name for path in (ROOT / "payload").glob("*/__init__.py")}
    assert packages <= PACKAGES
    assert set(RULES) > PACKAGES
    assert {path.name for path in (ROOT / "payload").glob("*.py")} == {"__init__.py", "__main__.py"}


@pytest.mark.processes
def test_the_lower_packages_import_without_any_installed_package() -> None:
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
    files = [path for name in LOWER for path in (ROOT / "payload" / name).glob("*.py")]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files]
    program += "".join(f"import {name}\n" for name in names)
    program += "from payload.models.registry import families\nfamilies()\n"
    # -S excludes site-packages; -I excludes the environment and this folder.
    subprocess.run([sys.executable, "-I", "-S", "-c", program], check=True)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("payload/core/errors.py", "import torch"),
        ("payload/core/errors.py", "from payload import train"),
        ("payload/core/errors.py", "from payload.launch.ranks import Rank"),
        ("payload/models/gpt2/spec.py", "import torch"),
        ("payload/models/gpt2/spec.py", "from payload.data.writing.meta import read_meta"),
        ("payload/models/gpt2/spec.py", "import importlib\nx = importlib.import_module(name)"),
        ("payload/launch/ranks.py", "import subprocess"),
        ("payload/launch/ranks.py", "def place():\n    import torch.nn as nn\n"),
        ("payload/launch/ranks.py", "from ..orchestrate import cli"),
        ("payload/launch/ranks.py", "from .. import train"),
        ("payload/launch/ranks.py", "import importlib\nx = importlib.import_module('torch')"),
        ("payload/__main__.py", "from payload.orchestrate import start"),
        ("payload/cli/commands.py", "import torch"),
        ("payload/orchestrate/commands/plan_and_run.py", "import paramiko"),
        (
            "payload/orchestrate/commands/plan_and_run.py",
            "def f():\n    from google.cloud import compute_v1\n",
        ),
        ("payload/orchestrate/commands/sweep.py", "import google.auth"),
        ("payload/orchestrate/sites/ssh.py", "import huggingface_hub"),
        ("infra/gcp/nodes.py", "import google.cloud.storage"),
        ("payload/orchestrate/ssh/connection.py", "from torch import nn"),
        (
            "payload/orchestrate/commands/plan_and_run.py",
            "from payload.train.ranks.world import World",
        ),
        ("payload/orchestrate/commands/plan_and_run.py", "import pulumi.automation"),
        ("payload/orchestrate/commands/plan_and_run.py", "import infra.config"),
        ("payload/supervise/run.py", "if True:\n    from torch import distributed\n"),
        ("payload/train/ranks/world.py", "from payload.launch import ranks"),
        ("payload/train/deep/world.py", "from ...orchestrate import ssh"),
        ("payload/generate/x.py", "import payload.supervise"),
        ("payload/data/x.py", "from payload.train.families.gpt2.model import GPT"),
        ("payload/data/x.py", "def f(name):\n    return __import__(name)\n"),
        ("infra/gcp/nodes.py", "from payload.launch.ranks import Rank"),
        ("infra/gcp/nodes.py", "from payload.config.run_config import RunConfig"),
        ("infra/gcp/nodes.py", "import paramiko"),
        ("payload/train/x.py", "print('hello')"),
        ("payload/train/x.py", "import os\nHOME = os.environ.get('HOME')"),
        ("payload/train/x.py", "for i in range(3):\n    pass\n"),
        ("payload/train/x.py", "with open('x') as f:\n    TEXT = f.read()\n"),
        ("payload/train/x.py", "class A:\n    now = time.time()\n"),
    ],
)
def test_the_checker_finds_what_the_table_forbids(path: str, source: str) -> None:
    assert violations(PurePosixPath(path), source)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("payload/core/errors.py", "import json\nfrom payload import __version__\n"),
        (
            "payload/launch/ranks.py",
            "from payload.machines.inventory import Node\nfrom . import files\n",
        ),
        ("payload/models/registry.py", "import importlib\nx = importlib.import_module(name)"),
        ("payload/launch/plan_record.py", "from payload.models.spec import ModelSpec\n"),
        (
            "payload/orchestrate/ssh/connection.py",
            "import paramiko\nfrom payload.launch import files\n",
        ),
        (
            "payload/generate/x.py",
            "import torch\nfrom payload.train.families.gpt2.model import GPT\n",
        ),
        ("payload/orchestrate/clouds/gcp/client.py", "def f():\n    import google.auth\n"),
        ("infra/gcp/nodes.py", "import pulumi\nfrom payload.machines.inventory import Node\n"),
        (
            "payload/train/x.py",
            "import re\n_WORD = re.compile('a')\nif __name__ == '__main__':\n    print(1)\n",
        ),
        ("tests/test_x.py", "import torch, paramiko, payload.train\n"),
    ],
)
def test_the_checker_lets_pass_what_the_table_allows(path: str, source: str) -> None:
    assert violations(PurePosixPath(path), source) == []


def test_no_module_outside_the_model_packages_names_a_family() -> None:
    found = [
        line
        for path in source_files()
        for line in family_names(
            PurePosixPath(path.relative_to(ROOT).as_posix()), path.read_text(encoding="utf-8")
        )
    ]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "from payload.models.gpt2.spec import Gpt2Spec",
        "import payload.train.families.llama",
        "x = model.spec.n_head",
        "def f(n_embd): pass",
        "class Qwen3Spec: pass",
        "if kind == 'gpt2': pass",
        "weight = model.wte.weight",
        "NAMES = ('model.embed_tokens.weight',)",
    ],
)
def test_the_search_for_families_finds(source: str) -> None:
    assert family_names(PurePosixPath("payload/train/x.py"), source)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("payload/models/gpt2/spec.py", "PRESETS = {'gpt2': 1}"),
        ("payload/train/families/llama/model.py", "class Llama: pass"),
        ("payload/train/x.py", "MESSAGE = 'as in GPT-2 and Llama'"),
        ("payload/train/x.py", "# like gpt2\nx = spec.num_heads()"),
        ("payload/config/training_sections.py", "class S:\n    n_layer: int = 1"),
    ],
)
def test_the_search_for_families_lets_pass(path: str, source: str) -> None:
    assert family_names(PurePosixPath(path), source) == []


@pytest.mark.processes
def test_nothing_in_the_tree_unpickles() -> None:
    found = [
        line
        for path in repository_files()
        if path.suffix == ".py"
        for line in unpickling(
            PurePosixPath(path.relative_to(ROOT).as_posix()), path.read_text(encoding="utf-8")
        )
    ]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def f():\n    from pickle import loads\n",
        "import shelve, json",
        "import marshal",
        "import dill as serializer",
        "from cloudpickle import dumps",
        "import joblib.externals",
        "__import__('pickle')",
        "import importlib\nx = importlib.import_module('pickle')",
        "from multiprocessing.connection import Client",
        "import torch.multiprocessing as mp",
        "from torch import multiprocessing",
        "from concurrent.futures import ProcessPoolExecutor",
        "x = concurrent.futures.ProcessPoolExecutor()",
        "dist.broadcast_object_list(box)",
        "from torch.distributed import all_gather_object",
        "dist.all_gather_object(values, value)",
        "dist.recv_object_list(box)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=safe)",
        "numpy.load(path, allow_pickle=True)",
        "np.memmap(path, allow_pickle=trusted)",
        "pandas.read_pickle(path)",
    ],
)
def test_the_search_for_pickle_finds(source: str) -> None:
    assert unpickling(PurePosixPath("payload/train/x.py"), source)


@pytest.mark.parametrize(
    "source",
    [
        "import json\nfrom safetensors.torch import load_file",
        "torch.load(path, weights_only=True)",
        "numpy.load(path, allow_pickle=False)",
        "MESSAGE = 'the pickle format can run code'",
        "dist.all_gather(values, value)",
    ],
)
def test_the_search_for_pickle_lets_pass(source: str) -> None:
    assert unpickling(PurePosixPath("payload/train/x.py"), source) == []


_UNSAFE = re.compile(
    r"AutoAddPolicy|WarningPolicy|StrictHostKeyChecking[= ]+(no|off|accept-new)\b|shell=True"
)


def test_no_host_key_is_accepted_unseen_and_no_shell_gets_a_text_to_split() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for top in ("payload", "infra", "bootstrap")
        for path in sorted((ROOT / top).rglob("*"))
        if path.suffix in (".py", ".sh", ".j2")
        if (match := _UNSAFE.search(path.read_text(encoding="utf-8")))
    ]
    assert found == []


# Split, so that this file does not contain the searched text.
_PRIVATE_KEY = re.compile("-----BEGIN [A-Z ]*" + "PRIVATE KEY-----")
_MACHINE_PATH = re.compile(
    r"(?<![\w.~$}/-])/(?:ro" + r"ot|wo" + r"rk|Users|home/(?!trainer/)\w+)[/\w]*/"
)
_SECRET = re.compile("(AKI" + "A[0-9A-Z]{16}|AIza[0-9A-Za-z_-]{35}|ghp_[0-9A-Za-z]{36})")


@pytest.mark.processes
@pytest.mark.parametrize(
    "pattern", [_PRIVATE_KEY, _MACHINE_PATH, _SECRET], ids=["private key", "machine path", "token"]
)
def test_no_file_of_the_repository_holds(pattern: re.Pattern[str]) -> None:
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in repository_files()
        if (match := pattern.search(path.read_text(encoding="utf-8", errors="replace")))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (_PRIVATE_KEY, "-----BEGIN OPENSSH " + "PRIVATE KEY-----"),
        (_PRIVATE_KEY, "-----BEGIN " + "PRIVATE KEY-----"),
        (_MACHINE_PATH, 'open("/ro' + 'ot/x/y")'),
        (_MACHINE_PATH, "cd /wo" + "rk/main/"),
        (_MACHINE_PATH, "python=/home/" + "someone/bin/python"),
        (_SECRET, "AKI" + "AABCDEFGHIJKLMNOP"),
    ],
)
def test_the_search_finds_what_must_not_be_there(pattern: re.Pattern[str], text: str) -> None:
    assert pattern.search(text)


@pytest.mark.parametrize("text", ["https://x.org/work/main/", "$HOME/work/a/", "runs/root/a/"])
def test_the_search_passes_ordinary_text(text: str) -> None:
    assert not _MACHINE_PATH.search(text)
