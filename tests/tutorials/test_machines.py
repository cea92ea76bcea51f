"""The tutorials of machines without internet, of Slurm and of GPUs, and README's commands."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.chat_data import conversations
from tests.support.waiting import DEADLINE_S
from tests.test_install_payload import make_wheel, write_lock
from tests.tutorials.conftest import RunPage, run_script
from tests.tutorials.pages import ROOT, TUTORIALS, read_page, script
from tests.tutorials.substitutions import TABLE

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(900)]

_EXTRAS = "train, quant, fp8, orchestrate, infra, monitor, dev"


def git(*words: str, cwd: Path) -> None:
    """Run git as a user with a name."""
    who = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    subprocess.run(
        ["git", *who, *words], cwd=cwd, check=True, capture_output=True, timeout=DEADLINE_S
    )


def test_an_environment_and_a_run_need_no_network(clone: Path, tiny: Path) -> None:
    """The packages are two tiny wheels; make, pip and git are real."""
    for name in ("alpha", "beta"):
        make_wheel(clone / "index", name, "1.0")
    lock = write_lock(clone, f"alpha==1.0  # {_EXTRAS}", f"beta==1.0  # {_EXTRAS}")
    project = clone / "project"
    (project / "bootstrap").mkdir(parents=True)
    for name in ("install-payload.sh", "tileforge"):
        (project / "bootstrap" / name).write_bytes((ROOT / "bootstrap" / name).read_bytes())
        (project / "bootstrap" / name).chmod(0o755)
    (project / "Makefile").write_bytes((ROOT / "Makefile").read_bytes())
    lock.rename(project / "bootstrap" / "requirements.lock")
    git("init", "-q", cwd=project)
    git("add", ".", cwd=project)
    git("commit", "-q", "-m", "all", cwd=project)
    (clone / "chats.jsonl").write_text(chats(), encoding="utf-8")
    page = read_page(TUTORIALS / "air_gapped.md")
    printed = run_script(
        script(page, TABLE["air_gapped.md"], tiny=str(tiny)),
        project,
        PATH=f"{clone / 'bin'}:{os.environ['PATH']}",
        PIP_NO_INDEX="1",
        PIP_FIND_LINKS=str(clone / "index"),
    )
    assert sorted(path.name[:5] for path in (clone / "wheels").iterdir()) == ["alpha", "beta-"]
    assert "../wheels is complete: 2 wheels" in printed and "detached HEAD" not in printed
    assert "on the machine without internet: make setup WHEELHOUSE=../wheels" in printed
    status = subprocess.run(
        ["git", "status", "--porcelain"], cwd=project, capture_output=True, check=True
    )
    assert status.stdout == b""
    offline = clone / "tileforge"
    assert list((offline / ".venv").glob("lib/python*/site-packages/beta.py"))
    assert (offline / "runs" / "latest" / "report.html").exists()


def test_the_tutorial_of_a_gpu_rehearses_without_one(run_page: RunPage, clone: Path) -> None:
    (clone / "data").mkdir()
    printed = run_page(TUTORIALS / "gpu.md")
    assert (clone / "page.md").exists() and "device.kind" in printed


@pytest.mark.skipif(shutil.which("sbatch") is not None, reason="the page would submit jobs")
def test_the_tutorial_of_slurm_leads_to_jobs_that_only_lack_sbatch(
    run_page: RunPage, clone: Path
) -> None:
    printed = run_page(TUTORIALS / "slurm.md")
    assert "tokens/s" in printed and printed.count("error: no sbatch on PATH") == 2
    assert (clone / "finetuned" / "chats" / "data" / "train.bin").exists()
    assert list((clone / "runs").glob("*")) == []


def test_the_commands_of_the_readme_lead_from_files_to_a_shared_model(
    clone: Path, tiny: Path
) -> None:
    (clone / "chats.jsonl").write_text(chats(), encoding="utf-8")
    (clone / "tickets.csv").write_text(
        "text,label\n" + "".join(f"ticket {i},{'ab'[i % 2]}\n" for i in range(60)), encoding="utf-8"
    )
    pages = sorted((ROOT / "docs" / "guides").glob("[a-m]*.md"))
    (clone / "pages.txt").write_text(
        "".join(page.read_text(encoding="utf-8") for page in pages), encoding="utf-8"
    )
    collect = (
        f"collect() {{ (cd {ROOT} && python -m pytest -q -n 0 --collect-only $1 >/dev/null); }}"
    )
    text = script(read_page(ROOT / "README.md"), TABLE["README.md"], tiny=str(tiny))
    run_script(f"{collect}\n{text}", clone)
    assert (clone / "mine" / "model.safetensors").exists() and (clone / "mine.gguf").exists()
    assert (clone / "runs" / "latest" / "report.html").exists()


def chats() -> str:
    """Return 60 conversations as JSON lines."""
    import json

    rows = ({"messages": each} for each in conversations(60))
    return "".join(f"{json.dumps(row)}\n" for row in rows)
