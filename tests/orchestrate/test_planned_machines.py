"""`plan` for machines that do not exist yet, for a Slurm job, and configs without a setting."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from payload.core.errors import ExitCode
from payload.orchestrate.__main__ import main
from tests.support.data_folders import make_data_folder
from tests.support.launching import REPO

Capture = pytest.CaptureFixture[str]
QUICKSTART = str(REPO / "payload" / "configs" / "quickstart.toml")
ENV = {"PATH": "/usr/bin:/bin"}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the data of the quickstart."""
    monkeypatch.chdir(tmp_path)
    make_data_folder(tmp_path / "data" / "stdlib", vocab_size=512)
    return tmp_path


def plan(*words: str) -> int:
    return main(["plan", QUICKSTART, "--inventory", "local", *words], ENV)


def test_nodes_plans_for_machines_like_this_one(capsys: Capture) -> None:
    assert plan("--nodes", "2", "--set", "batch.global_batch_size=16") == ExitCode.OK
    out, err = capsys.readouterr()
    assert "2 node(s) like" in err and "interface ens4" in err
    assert "each of 4 rank(s)" in out and re.search(r"^  3 +node-1 +1 ", out, re.MULTILINE)
    assert plan("--nodes", "0") == ExitCode.USAGE
    assert "--nodes 0: must be 1 or more" in capsys.readouterr().err


def test_a_machine_type_has_its_cores_and_its_price(capsys: Capture) -> None:
    words = ("--machine-type", "c3-highmem-8", "--set", "batch.global_batch_size=24")
    assert plan("--nodes", "3", *words) == ExitCode.OK
    out, err = capsys.readouterr()
    assert "3 x c3-highmem-8 in us-central1-a, 300 GiB pd-balanced, $1.64/h" in err
    assert "12 physical core(s)" in err
    assert re.search(r"duration .*, \$0\.\d\d, at ", out)
    assert plan("--machine-type", "c9-huge") == ExitCode.CONFIG
    assert "--machine-type c9-huge: unknown family 'c9'. Use one of: c3" in capsys.readouterr().err


def test_site_slurm_plans_the_job_and_not_the_login_node(capsys: Capture) -> None:
    job = ("--site", "slurm", "--set", "slurm.nodes=2")
    assert plan(*job) == ExitCode.CONFIG
    err = capsys.readouterr().err
    assert "batch.global_batch_size = 8 is not a multiple of" in err and "4 x 4 = 16" in err
    assert plan(*job, "--set", "batch.global_batch_size=16") == ExitCode.OK
    out, err = capsys.readouterr()
    assert "2 node(s) like" in err and "starts the ranks with srun" in err
    assert "each of 4 rank(s)" in out
    # No command or path of another kind of cluster: what Slurm runs.
    assert "mpirun" not in out and "/home/trainer" not in out and "accelerate" not in out
    lines = [line.strip() for line in out.splitlines()]
    submit = lines[lines.index("submitted with") + 1]
    assert re.fullmatch(
        rf"sbatch --parsable {re.escape(str(Path.cwd()))}/runs/\S+/job\.sbatch", submit
    )
    assert {"#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=1"} <= set(lines)
    ranks = lines[lines.index("the job starts the ranks with") + 1]
    assert ranks.startswith("srun --nodes=2 --ntasks=4 --ntasks-per-node=2 ")
    assert f" -m payload.train --run-dir {Path(submit.split()[-1]).parent}" in ranks


@pytest.mark.parametrize("command", ["plan", "run", "preflight"])
@pytest.mark.parametrize("text", ["", "# only a comment\n", "\n[data]\n"])
def test_a_config_without_a_setting_is_refused(
    text: str, command: str, place: Path, capsys: Capture
) -> None:
    (place / "run.toml").write_text(text)
    words = [command, "--config", "run.toml", "--inventory", "local", "--set", "train.steps=5"]
    assert main(words, ENV) == ExitCode.CONFIG
    err = capsys.readouterr().err
    assert "config run.toml: no setting in the file. Set at least data.dir" in err
