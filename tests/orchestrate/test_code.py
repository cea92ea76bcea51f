"""The payload's code on a node: assembled from existing and uploaded files."""

from __future__ import annotations

import fcntl
import hashlib
import io
import tarfile
from pathlib import Path
from typing import Any

import pytest

from payload.orchestrate.node.look import act, running
from payload.orchestrate.ssh.node_code import archive, this_code
from payload.orchestrate.ssh.remote_calls import NODE_FOLDER
from payload.stack.node_paths import VENV
from tests.test_architecture import ROOT


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def look(home: Path, digest: str, files: dict[str, str]) -> list[str] | None:
    arguments: dict[str, Any] = {"action": "look", "digest": digest, "files": files, "venv": "/no"}
    arguments |= {"programs": [], "wholes": [], "folder": NODE_FOLDER, "ports": [20_000, 20_100]}
    missing: list[str] | None = act(arguments, home=home)["missing"]
    return missing


def finish(home: Path, digest: str, files: dict[str, str]) -> list[str]:
    arguments = {"action": "finish", "folder": NODE_FOLDER, "digest": digest, "files": files}
    wrong: list[str] = act(arguments, home=home)["wrong"]
    return wrong


@pytest.mark.processes
def test_only_what_changed_is_missing_the_second_time(tmp_path: Path) -> None:
    first = {"payload/a.py": sha256("a"), "payload/b.py": sha256("b")}
    assert look(tmp_path, "one", first) == ["payload/a.py", "payload/b.py"]
    partial = tmp_path / "tileforge" / ".payload-one" / "payload"
    (partial / "a.py").write_text("a")
    assert look(tmp_path, "one", first) == ["payload/b.py"]
    (partial / "b.py").write_text("half")
    assert finish(tmp_path, "one", first) == ["payload/b.py"]
    (partial / "b.py").write_text("b")
    assert finish(tmp_path, "one", first) == finish(tmp_path, "one", first) == []
    assert look(tmp_path, "one", first) is None
    second = {**first, "payload/b.py": sha256("B")}
    assert look(tmp_path, "two", second) == ["payload/b.py"]


def test_the_digest_names_the_files_and_leaves_out_caches() -> None:
    code = this_code()
    assert "payload/core/errors.py" in code.files and code.digest == this_code().digest
    assert not [name for name in code.files if "__pycache__" in name]


def test_an_archive_holds_what_it_was_given() -> None:
    with tarfile.open(fileobj=io.BytesIO(archive({"a/b.txt": b"text"}))) as tar:
        extracted = tar.extractfile("a/b.txt")
        assert extracted is not None and extracted.read() == b"text"


def test_the_head_names_the_run_that_holds_its_lock(tmp_path: Path) -> None:
    runs = tmp_path / "tileforge" / "runs"
    for name in ("old", "new"):
        (runs / name).mkdir(parents=True)
        (runs / name / "supervisor.lock").touch()
    assert running(runs) is None
    with (runs / "new" / "supervisor.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert running(runs) == "new"
        asked = {"action": "running", "folder": NODE_FOLDER}
        assert act(asked, home=tmp_path) == {"running": "new", "runs": []}


def test_the_nodes_environment_is_where_their_bootstrap_makes_it() -> None:
    user_data = (ROOT / "tests/golden/cloud-init.yaml").read_text(encoding="utf-8")
    assert f"VENV={VENV}\n" in user_data
