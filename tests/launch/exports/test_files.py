"""`plan --export`: the file of every engine, word for word and by the engine's own parser."""

from __future__ import annotations

import importlib
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from payload.config.run_config import parse_run_config
from payload.core.errors import ExitCode, UsageError
from payload.launch.exports import kubeflow_common as kubernetes
from payload.launch.exports.base import Engine
from payload.launch.exports.registry import ENGINES
from payload.launch.exports.yaml_text import Value, render
from payload.orchestrate.__main__ import main
from tests.launch.exports.engines import parse
from tests.launch.exports.jobs import job_for
from tests.launch.exports.kubelet import expand
from tests.support.golden_files import assert_golden

HOSTILE = 'it\'s "$(touch owned)" `id` ${{ env.X }} \\ %s \u00e9 #: - END_OF_RUN_TOML'


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_a_run_of_two_nodes_is_this_file(engine: Engine) -> None:
    suffix = "sh" if engine.name == "sbatch" else "yaml"
    assert_golden(f"export.{engine.name}.{suffix}", engine.render(job_for(engine)))


@pytest.mark.parametrize("name", ["sbatch", "mpijob"])
def test_no_program_of_it_takes_code_or_options_from_the_shared_folder(name: str) -> None:
    text = ENGINES[name].render(job_for(ENGINES[name]))
    for line in text[: text.find("export PYTHONSAFEPATH=1")].splitlines():
        assert "install-payload.sh" not in line
        assert "python3 -c" not in line
        assert "mpirun -f" not in line


def test_what_an_mpijob_imports_finds_the_interface() -> None:
    text = ENGINES["mpijob"].render(job_for(ENGINES["mpijob"]))
    found = re.search(r"from (payload\.\S+) import (\w+);", text)
    assert found is not None
    assert getattr(importlib.import_module(found[1]), found[2])("127.0.0.1") == "lo"


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_the_engine_s_own_parser_takes_the_file(engine: Engine, tmp_path: Path) -> None:
    job = replace(job_for(engine, name=HOSTILE), max_hours=1.5)
    jobs = [job] if engine.needs_image else [job, replace(job, image=None)]
    files = [tmp_path / f"exported-{number}" for number in range(len(jobs))]
    for file, each in zip(files, jobs, strict=True):
        file.write_text(engine.render(each), encoding="utf-8")
    if engine.name == "sbatch":
        shells = [["bash", "-n", str(file)] for file in files]
        done = [subprocess.run(each, capture_output=True, text=True) for each in shells]
    else:
        done = [parse(engine.name, *files, home=tmp_path)]
    for result in done:
        assert result.returncode == 0, result.stderr[-2000:]


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("mpijob", "slotsPerWorker", "slotPerWorker"),
        ("mpijob", "mountPath", "mountpath"),
        ("trainjob", "numProcPerNode", "procPerNode"),
        ("trainjob", "claimName", "claim"),
        ("skypilot", "num_nodes", "nodes"),
        ("dstack", "commands", "command"),
    ],
)
def test_a_wrong_key_is_refused_by_that_parser(
    name: str, old: str, new: str, tmp_path: Path
) -> None:
    file = tmp_path / "exported"
    text = ENGINES[name].render(job_for(ENGINES[name]))
    assert f"{old}:" in text
    file.write_text(text.replace(f"{old}:", f"{new}:"), encoding="utf-8")
    assert parse(name, file, home=tmp_path).returncode != 0


@pytest.mark.processes
@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_hostile_text_in_the_config_arrives_as_it_is(engine: Engine, tmp_path: Path) -> None:
    job = job_for(engine, name=HOSTILE)
    text = engine.render(job)
    if engine.name != "sbatch":
        text = next(
            script for script in scripts_in(text) if "run.toml" in script or "config=" in script
        )
    begin = next(line for line in text.splitlines() if line.startswith("cat >"))
    heredoc = text[text.index(begin) : text.index("END_OF_RUN_TOML\n", text.index(begin) + 80)]
    target = tmp_path / "run.toml"
    script = f"cat >{target} <<'END_OF_RUN_TOML'\n{heredoc.partition(chr(10))[2]}END_OF_RUN_TOML\n"
    subprocess.run(["bash", "-c", script], check=True, cwd=tmp_path)
    assert parse_run_config(target.read_text(encoding="utf-8"), where="x").run.name == HOSTILE
    assert not (tmp_path / "owned").exists()


def scripts_in(text: str) -> list[str]:
    """All scripts in the documents, as a container's shell gets them."""
    found: list[str] = []

    def walk(node: object) -> None:
        if isinstance(node, dict):
            for value in node.values():
                walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)
        elif isinstance(node, str) and "\n" in node:
            found.append(node)

    for document in yaml.safe_load_all(text):
        walk(document)
        if str(document.get("apiVersion", "")):
            found = [expand(each, {}) for each in found]
    return found


@pytest.mark.parametrize(
    "text", ["a $(NAME) b", "$$", "$$(NAME)", "${NAME} $((1 + 2)) $", "echo $$ $(date)", "$$$(X)"]
)
def test_kubernetes_leaves_a_script_as_it_is(text: str) -> None:
    command = kubernetes.bash(text)
    assert expand(str(command[2]), {"NAME": "wrong", "X": "wrong", "date": "wrong"}) == text


@pytest.mark.parametrize(
    "value",
    [
        {"a": "", "b": "yes", "c": "1", "d": "1.5", "e": "~", "f": "a: b", "g": "- x", "h": "#"},
        {"text": "  indented\nlines\n", "tabs": "a\tb\n", "none": "no newline\nat the end"},
        {"script": "a\n\n  b\nc\n", "trailing": "a \nb\n", "more": "a\n\n", "crlf": "a\r\nb\n"},
        {"lists": [[1, 2], [], [{"a": [1], "b": {}}, "x\ny\n"]], "map": {"k": {"l": True}}},
        {"y": "null", "on": "0x1", "12": "é", "a b": "'", "2026-11-24": "2026-11-24", "n": -3},
    ],
)
def test_yaml_reads_back_as_what_was_written(value: dict[str, Value]) -> None:
    assert yaml.safe_load(render(value)) == value


@pytest.mark.parametrize(
    ("run_id", "name"),
    [
        ("tiny-1", "tiny-1"),
        ("1st", "run-1st-8d4b"),
        ("A.b_c", "a-b-c-17a4"),
        ("x" * 60, "x" * 35 + "-"),
    ],
)
def test_a_run_s_name_is_one_that_every_engine_takes(run_id: str, name: str) -> None:
    found = job_for(ENGINES["mpijob"], run_id=run_id).name
    assert len(found) <= 40 and found.startswith(name[:-4])
    other = job_for(ENGINES["mpijob"], run_id=run_id.swapcase() + ".").name
    assert other != found


def exported(*words: str) -> int:
    """Run `plan --export ...` here."""
    return main(["plan", "--inventory", "local", "--run-id", "tiny-1", *words], {"PATH": "/bin"})


def test_the_command_writes_a_file_that_says_how_it_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "job.yaml"
    words = ("--export", "dstack", "--storage", "runs", "--out", str(out), "--nodes", "3")
    assert exported(*words, "--set", "batch.global_batch_size=24") == ExitCode.OK
    said = capsys.readouterr()
    assert said.out == "" and f"Start it with: dstack apply -f {out}" in said.err
    assert "must be in the engine's storage" in said.err
    task = yaml.safe_load(out.read_text(encoding="utf-8"))
    assert task["nodes"] == 3 and task["volumes"] == ["runs-${{ dstack.node_rank }}:/mnt/tileforge"]
    assert (
        exported(*words[:4], "--nodes", "1", "--set", "batch.global_batch_size=24") == ExitCode.OK
    )
    task = yaml.safe_load(capsys.readouterr().out)
    assert task["nodes"] == 1 and task["volumes"] == ["runs:/mnt/tileforge"]


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--export", "mpijob"], ExitCode.USAGE, "needs a container image"),
        (["--export", "trainjob"], ExitCode.USAGE, "needs a container image"),
        (["--export", "skypilot"], ExitCode.USAGE, "with --storage"),
        (["--export", "dstack", "--storage", "a b"], ExitCode.USAGE, "--storage 'a b'"),
        *(
            (
                ["--export", engine, "--storage", storage, *image],
                ExitCode.USAGE,
                f"--storage {storage!r}: the storage for {engine} must be {what}",
            )
            for engine, storage, what, image in (
                ("mpijob", "gs://b", "a persistent volume claim", ["--image", "x"]),
                ("mpijob", "Claim", "a persistent volume claim", ["--image", "x"]),
                ("trainjob", "/mnt/nfs", "a persistent volume claim", ["--image", "x"]),
                ("skypilot", "/mnt/nfs", "a bucket", []),
                ("skypilot", "file:///mnt", "a bucket", []),
                ("dstack", "gs://b", "a volume's name", []),
                ("dstack", "shared/x", "a volume's name", []),
                ("sbatch", "gs://b", "a folder", []),
                ("sbatch", "-", "a folder", []),
            )
        ),
        (["--export", "sbatch", "--image", "x"], ExitCode.USAGE, "Leave --image out"),
        (["--export", "mpijob", "--image", "x y"], ExitCode.USAGE, "not a valid image name"),
        (["--export", "sbatch", "--nodes", "0"], ExitCode.USAGE, "--nodes 0"),
        (["--export", "sbatch", "--nodes", "7"], ExitCode.CONFIG, "batch.global_batch_size"),
        (["--export", "sbatch", "--out", "/proc/no/x"], ExitCode.USAGE, "--out /proc/no/x"),
        (["--image", "x"], ExitCode.USAGE, "--image needs --export ENGINE"),
        (
            ["--export", "sbatch", "--set", "launch.malloc=tcmalloc"],
            ExitCode.CONFIG,
            "launch.malloc",
        ),
    ],
)
def test_what_an_engine_cannot_do_is_one_line(
    words: list[str], code: ExitCode, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exported(*words) == code
    said = capsys.readouterr()
    assert said.out == "" and says in said.err.splitlines()[-1]
    assert said.err.splitlines()[-1].startswith("error: ")


@pytest.mark.parametrize(
    ("engine", "storage"),
    [
        ("mpijob", "claim-1.a"),
        ("trainjob", "c"),
        ("skypilot", "s3://acme.runs/a_b/c"),
        ("skypilot", "My_volume"),
        ("dstack", "/mnt/NFS_1.x"),
        ("dstack", "runs"),
        ("sbatch", "../Shared_1/x.y"),
        ("sbatch", "/scratch/x"),
    ],
)
def test_storage_that_the_engine_has_is_taken(engine: str, storage: str) -> None:
    job = replace(job_for(ENGINES[engine]), storage=storage)
    ENGINES[engine].require(job)
    assert storage in ENGINES[engine].render(job)


@pytest.mark.processes
@pytest.mark.parametrize("storage", ["shared/x", None])
def test_a_folder_that_nodes_share_may_be_relative_to_the_submitting_one(
    storage: str | None, tmp_path: Path
) -> None:
    job = replace(job_for(ENGINES["sbatch"]), storage=storage)
    folder = tmp_path / (storage or "")
    folder.mkdir(parents=True, exist_ok=True)
    text = ENGINES["sbatch"].render(job)
    # What is behind needs a cluster; the set-up of packages finds its result there.
    begin = text[: text.index("MASTER_ADDR=")]
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    subprocess.run(
        ["bash", "-c", begin],
        check=True,
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "SLURM_SUBMIT_DIR": str(tmp_path)},
    )
    assert [each.parent for each in tmp_path.rglob("run.toml")] == [folder / "runs" / "tiny-1"]


def test_a_time_limit_of_the_run_is_the_engine_s() -> None:
    for name, words in {
        "sbatch": "--time=90",
        "mpijob": "activeDeadlineSeconds: 5400",
        "trainjob": "activeDeadlineSeconds: 5400",
        "dstack": 'max_duration: "5400s"',
    }.items():
        job = replace(job_for(ENGINES[name]), max_hours=1.5)
        text = ENGINES[name].render(job)
        assert words in text and "scontrol requeue" not in text


def test_the_settings_of_slurm_are_options_of_the_batch_script(
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = ("nodes=2", "partition=cpu", "account=lab", "time=1-00", "extra=--constraint='a b'")
    words = [word for each in settings for word in ("--set", f"slurm.{each}")]
    batch = ("--set", "batch.global_batch_size=96", "--set", "limits.max_hours=1")
    assert exported("--export", "sbatch", *words, *batch) == ExitCode.OK
    lines = capsys.readouterr().out.splitlines()
    options = [line for line in lines if line.startswith("#SBATCH ")]
    assert "#SBATCH --nodes=2" in options
    assert options[-4:] == [
        "#SBATCH --partition=cpu",
        "#SBATCH --account=lab",
        "#SBATCH --time=1-00",
        "#SBATCH '--constraint=a b'",
    ]
    assert len([line for line in options if "--time=" in line]) == 1


def test_an_engine_without_what_it_needs_refuses_the_job() -> None:
    with pytest.raises(UsageError, match="Build an image"):
        ENGINES["mpijob"].require(replace(job_for(ENGINES["mpijob"]), image=None))
