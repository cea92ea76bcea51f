"""Removal of runs, config arguments, and disk and time in `plan`."""

from __future__ import annotations

import errno
import json
import os
import pty
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from payload.core.errors import INTERRUPTED, ExitCode
from payload.orchestrate.__main__ import main
from payload.orchestrate.runs.mirror import Mirrored, write_mirrored
from payload.orchestrate.runs.removal import finish_removals
from payload.orchestrate.runs.run_index import all_runs
from payload.orchestrate.runs.trash import trashed_runs
from payload.report.__main__ import main as report
from payload.run_record.run_files import RunPaths, Summary, point_latest_at, write_json
from payload.run_record.run_lock import RunLock
from payload.run_record.run_repair import known_dtype
from tests.orchestrate.sshd import make_cluster
from tests.orchestrate.test_commands import Workplace
from tests.orchestrate.test_findings import make_node
from tests.supervise.planned import plan_stand_in
from tests.support.machine_speed import plant_speed
from tests.support.run_folders import make_run

pytestmark = pytest.mark.processes


@pytest.fixture
def workplace(tmp_path: Path) -> Workplace:
    return Workplace(tmp_path)


def finished_run(root: Path, *, age_s: float, settings: tuple[str, ...] = ()) -> RunPaths:
    paths = make_run(
        root,
        settings=settings,
        steps=(5,),
        status="finished",
        exit_class="ok",
        started_unix=1.0,
        updated_unix=2.0,
    )
    os.utime(paths.plan, times=(time.time() - age_s,) * 2)
    return paths


def names(runs: Path) -> list[str]:
    return [paths.run_id for paths in all_runs(runs)]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for age_s, name in enumerate("dcba", 1):
        point_latest_at(finished_run(tmp_path / "runs" / name, age_s=100 * age_s))
    return tmp_path / "runs"


def remove(runs: Path, *arguments: str) -> int:
    return main(["remove", *arguments, "--yes", "--runs-dir", str(runs)], os.environ)


def test_named_runs_are_removed_and_latest_leads_to_one_that_is_left(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert remove(runs, "d", "b", "--dry-run") == 0
    assert capsys.readouterr().out.splitlines() == [
        "would remove d (finished, 0.00 GB)",
        "would remove b (finished, 0.00 GB)",
    ]
    assert names(runs) == ["d", "c", "b", "a"]
    (runs / "latest").unlink()
    (runs / "latest").symlink_to("d")
    assert remove(runs, "d", "b") == 0
    assert names(runs) == ["c", "a"]
    assert (runs / "latest").readlink() == Path("c")
    assert sorted(path.name for path in runs.iterdir()) == [".trash", "a", "c", "latest"]


def test_all_but_the_newest_are_removed(runs: Path) -> None:
    assert remove(runs, "--keep", "1") == 0
    assert names(runs) == ["d"]
    assert remove(runs, "--keep", "0", "--now") == 0
    assert [path.name for path in runs.iterdir()] == [".trash"]
    assert remove(runs, "--now") == 0
    assert list(runs.iterdir()) == []


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make standard input a terminal on which the operator types this line."""

    def typed(line: str) -> None:
        leader, follower = pty.openpty()
        os.write(leader, line.encode())
        monkeypatch.setattr("sys.stdin", os.fdopen(follower, encoding="utf-8"))

    return typed


def test_what_goes_is_listed_with_its_size_before_the_question(
    runs: Path, answers: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    (runs / "a" / "checkpoints" / "model.bin").write_bytes(b"x" * 25_000_000)
    words = ["remove", "--keep", "2", "--runs-dir", str(runs)]
    answers("n\n")
    assert main(words, os.environ) == 0 and names(runs) == ["d", "c", "b", "a"]
    asked = capsys.readouterr().err
    assert "  b (finished, 0.00 GB)\n  a (finished, 0.03 GB)\n" in asked
    assert asked.endswith("Move 2 runs (0.03 GB) to the trash? [y/N] ")
    answers("y\n")
    assert main(words, os.environ) == 0 and names(runs) == ["d", "c"]


def test_without_a_terminal_nothing_is_removed_before_yes(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["remove", "a", "--runs-dir", str(runs)], os.environ) == ExitCode.USAGE
    assert "repeat with --yes" in capsys.readouterr().err
    assert names(runs) == ["d", "c", "b", "a"]


def test_only_finished_runs_count_among_those_kept(runs: Path) -> None:
    for name, age_s in (("aborted", 1), ("failing", 2)):
        finished_run(runs / name, age_s=age_s)
        state = json.loads((runs / name / "state.json").read_text())
        state |= {"status": "failed", "exit_class": "hang"}
        (runs / name / "state.json").write_text(json.dumps(state))
    assert remove(runs, "--keep", "3") == 0
    assert names(runs) == ["d", "c", "b"]


def test_a_run_in_the_trash_is_restored_whole(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in (runs / "b").rglob("*") if path.is_file()}
    assert remove(runs, "b") == 0 and names(runs) == ["d", "c", "a"]
    assert main(["list", "--json", "--runs-dir", str(runs)], os.environ) == 0
    assert '"b"' not in capsys.readouterr().out
    assert remove(runs, "--restore", "c") == ExitCode.USAGE
    assert "run c is not in" in capsys.readouterr().err
    assert remove(runs, "--restore", "b") == 0 and names(runs) == ["d", "c", "b", "a"]
    assert {path: path.read_bytes() for path in before} == before
    assert remove(runs, "b") == 0
    finished_run(runs / "b", age_s=1)
    assert remove(runs, "--restore", "b") == ExitCode.USAGE
    assert "run b exists in" in capsys.readouterr().err


def test_the_trash_is_emptied_a_day_after_a_removal(runs: Path) -> None:
    photo = runs / ".trash" / "photos" / "photo.jpg"
    assert remove(runs, "a") == 0
    photo.parent.mkdir()
    photo.write_bytes(b"a summer")
    assert remove(runs, "b") == 0
    trashed = {each.record.run_id: each for each in trashed_runs(runs)}
    assert set(trashed) == {"a", "b"}
    record = trashed["a"].holder / "removal.json"
    removal = json.loads(record.read_text())
    removal["removed_unix"] -= 24 * 3600
    record.write_text(json.dumps(removal))
    assert remove(runs, "--keep", "9") == 0
    assert [each.record.run_id for each in trashed_runs(runs)] == ["b"] and photo.exists()
    assert remove(runs, "--now") == 0
    assert trashed_runs(runs) == [] and photo.exists() and names(runs) == ["d", "c"]


def test_a_running_run_is_never_removed(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunLock(RunPaths(runs / "b")):
        assert remove(runs, "b", "--force") == ExitCode.USAGE
        assert "kept: run b is running" in capsys.readouterr().err
        assert remove(runs, "--keep", "0", "--force") == 0
    assert names(runs) == ["b"]


def test_a_run_that_another_one_starts_from_is_not_removed_meanwhile(runs: Path) -> None:
    init = f"model.init={runs / 'a' / 'checkpoints' / 'step_00000005'}"
    other = finished_run(runs / "other", age_s=1, settings=(init,))
    with RunLock(other):
        assert remove(runs, "a") == ExitCode.USAGE
    assert remove(runs, "a") == 0


def test_a_run_whose_weights_an_adapter_needs_is_removed_after_it_or_by_force(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def train_adapter() -> None:
        init = f"model.init={runs / 'a' / 'checkpoints' / 'step_00000005'}"
        finished_run(runs / "lora", age_s=1, settings=(init, "adapter.kind=lora"))

    train_adapter()
    assert remove(runs, "--keep", "1") == 0
    needed = "kept: run a: the adapter of run lora was trained on the weights of this run"
    assert needed in capsys.readouterr().err
    assert names(runs) == ["lora", "a"]
    assert remove(runs, "a") == ExitCode.USAGE
    assert needed in capsys.readouterr().err
    assert remove(runs, "a", "lora", "--dry-run") == 0
    assert remove(runs, "a", "lora") == 0 and names(runs) == []
    finished_run(runs / "a", age_s=9)
    train_adapter()
    assert remove(runs, "a", "--force") == 0 and names(runs) == ["lora"]


def test_what_was_not_collected_is_removed_by_force_only(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, collected, alive in (
        ("a", None, False),
        ("b", "step_00000005", False),
        ("c", None, True),
    ):
        mirrored = Mirrored(alive=alive, seen_unix=1.0, ssh_key="k", collected=collected)
        write_mirrored(RunPaths(runs / name), mirrored)
    assert remove(runs, "a", "b", "c") == ExitCode.USAGE
    assert "a was not collected" in capsys.readouterr().err
    assert names(runs) == ["d", "c", "a"]
    assert remove(runs, "a", "c", "--force") == ExitCode.USAGE
    assert names(runs) == ["d", "c"]


@pytest.mark.parametrize("words", [["--keep", "0", "--force"], ["mine", "--force"]])
@pytest.mark.parametrize(
    "files",
    [
        {"hosts": "[web]\n10.0.0.1\n"},
        {"inventory.json": "{}", "checkpoints/step_00000005/manifest.json": "{}"},
        {"state.json": '{"run_id": "another"}', "plan.json": "{}", "ranks.json": "[]"},
        {"supervisor.lock": "", "summary.json": "[]"},
    ],
)
def test_a_folder_that_is_no_run_is_never_removed(
    runs: Path, words: list[str], files: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    mine = {"thesis.txt": "years of work", **files}
    for name, text in mine.items():
        path = runs / "mine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    os.utime(runs / "mine", times=(1.0, 1.0))
    remove(runs, *words)
    assert "mine" in names(runs)
    assert {name: (runs / "mine" / name).read_text() for name in mine} == mine
    if words[0] == "mine":
        said = capsys.readouterr().err
        assert "is not a run, or its records are gone. To delete this folder anyway: rm" in said
        assert f"rm -r {runs / 'mine'}" in said


def test_nothing_but_an_own_removal_is_finished(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos = [runs / name / "photo.jpg" for name in (".removed-photos", ".removing-photos")]
    for photo in photos:
        photo.parent.mkdir()
        photo.write_bytes(b"a summer")
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", interrupted)
        assert remove(runs, "a", "--now") == INTERRUPTED
    (holder,) = (path for path in runs.glob(".removing-*") if path not in photos[1].parents)
    assert (holder / "a" / "run.toml").exists()
    assert remove(runs, "--keep", "5") == 0
    assert all(photo.exists() for photo in photos) and not holder.exists()
    assert names(runs) == ["d", "c", "b"]


def interrupted(*_: object, **_more: object) -> None:
    raise KeyboardInterrupt


def test_a_half_deleted_run_is_not_restored(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted_after_the_plan(folder: Path, **_: object) -> None:
        (folder / "plan.json").unlink()
        raise KeyboardInterrupt

    assert remove(runs, "a") == 0
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", interrupted_after_the_plan)
        assert remove(runs, "--now") == INTERRUPTED
    assert remove(runs, "--restore", "a") == ExitCode.USAGE
    assert "run a is not in" in capsys.readouterr().err
    assert remove(runs, "--keep", "9") == 0
    assert sorted(path.name for path in runs.iterdir()) == ["b", "c", "d", "latest"]


@pytest.fixture
def during_the_prompt(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Make something happen in another terminal before the operator confirms."""

    def happens(action: Callable[[], object]) -> None:
        def confirm(_: str, *, assume_yes: bool) -> bool:
            action()
            return not assume_yes

        monkeypatch.setattr("payload.orchestrate.commands.remove.confirm", confirm)

    return happens


def test_a_run_is_kept_if_its_adapter_is_resumed_during_the_prompt(
    runs: Path,
    during_the_prompt: Callable[[Callable[[], object]], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    init = f"model.init={runs / 'a' / 'checkpoints' / 'step_00000005'}"
    lora = finished_run(runs / "lora", age_s=1, settings=(init, "adapter.kind=lora"))
    lock = RunLock(lora)
    during_the_prompt(lock.__enter__)
    words = ["remove", "a", "lora", "--runs-dir", str(runs)]
    assert main(words, os.environ) == ExitCode.USAGE
    lock.__exit__(None, None, None)
    said = capsys.readouterr()
    assert "kept: run lora is running" in said.err and "kept: run a: run lora, which" in said.err
    assert names(runs) == ["lora", "d", "c", "b", "a"] and "To get a run back" not in said.err


def test_a_run_is_never_moved_into_a_holder_without_a_record(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second command finds the holder between its record and the run's move into the holder."""
    holder = Path(tempfile.mkdtemp(prefix=".removing-", dir=runs))
    (holder / "removal.json").write_text('{"run_id": "a", "removed_unix": 1}')
    rmdir = Path.rmdir

    def moved_before(folder: Path) -> None:
        with suppress(FileNotFoundError):
            (runs / "a").rename(holder / "a")
        rmdir(folder)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rmdir", moved_before)
        finish_removals(runs)
    assert names(runs) == ["d", "c", "b", "a"]
    assert not list(runs.glob(".removing-*"))


def test_a_run_that_cannot_be_moved_is_not_in_the_trash(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rename = Path.rename

    def on_another_disk(path: Path, target: Path) -> Path:
        if path == runs / "a":
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", on_another_disk)
        assert remove(runs, "a") == ExitCode.CONFIG
    assert "cannot be removed (Invalid cross-device link)" in capsys.readouterr().err
    assert not (runs / ".trash").exists()


def test_a_record_without_a_run_is_no_run_in_the_trash(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command was killed between the record and the run's move."""
    for name, target in (("killed", None), ("linked", runs / "a")):
        holder = runs / ".trash" / name
        holder.mkdir(parents=True)
        (holder / "removal.json").write_text('{"run_id": "a", "removed_unix": 1}')
        if target is not None:
            (holder / "a").symlink_to(target)
    assert trashed_runs(runs) == []
    assert remove(runs, "--now") == 0
    assert capsys.readouterr().out == ""
    assert names(runs) == ["d", "c", "b", "a"]
    assert [path.name for path in (runs / ".trash").iterdir()] == ["linked"]


@pytest.mark.parametrize("words", [["--now"], ["--keep", "3", "--now"]])
def test_a_run_that_cannot_be_deleted_fails_the_command(
    runs: Path,
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def denied(*_: object, **_more: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    if words == ["--now"]:
        assert remove(runs, "a") == 0
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", denied)
        assert remove(runs, *words) == ExitCode.CONFIG
    (left,) = runs.glob(".removing-*/a")
    said = " ".join(capsys.readouterr().err.split())
    assert "cannot be removed (Permission denied). Remove the folder yourself: rm -r" in said
    assert "kept: " in said
    assert remove(runs, "--keep", "9") == 0 and not left.parent.exists()


def test_a_run_without_a_time_of_removal_is_not_deleted_by_age(runs: Path) -> None:
    holder = runs / ".trash" / "a-1"
    holder.mkdir(parents=True)
    (runs / "a").rename(holder / "a")
    (holder / "removal.json").write_text('{"run_id": "a"}')
    assert remove(runs, "--keep", "9") == 0
    assert remove(runs, "--restore", "a") == 0 and names(runs) == ["d", "c", "b", "a"]


def test_a_dry_run_lists_the_runs_in_the_trash(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert remove(runs, "a") == 0
    capsys.readouterr()
    assert remove(runs, "--now", "--dry-run") == 0
    assert capsys.readouterr().out == "would remove a (in the trash, 0.00 GB)\n"
    assert [each.record.run_id for each in trashed_runs(runs)] == ["a"]


def test_only_the_listed_runs_in_the_trash_are_deleted(
    runs: Path, during_the_prompt: Callable[[Callable[[], object]], None]
) -> None:
    assert remove(runs, "a", "b") == 0

    def another_terminal() -> None:
        assert remove(runs, "--restore", "b") == 0
        (runs / ".trash" / "c-1").mkdir()
        (runs / ".trash" / "c-1" / "removal.json").write_text('{"run_id": "c", "removed_unix": 9}')
        (runs / "c").rename(runs / ".trash" / "c-1" / "c")

    during_the_prompt(another_terminal)
    assert main(["remove", "--now", "--runs-dir", str(runs)], os.environ) == 0
    assert names(runs) == ["d", "b"]
    assert [each.record.run_id for each in trashed_runs(runs)] == ["c"]


def test_a_folder_that_is_no_run_does_not_count_among_those_kept(runs: Path) -> None:
    (runs / "newest").mkdir()
    (runs / "newest" / "hosts").touch()
    assert remove(runs, "--keep", "1") == 0
    assert names(runs) == ["newest", "d"]


@pytest.mark.parametrize("left", ["plan.json", "state.json"])
def test_a_damaged_or_renamed_run_is_removed(runs: Path, left: str) -> None:
    for record in {"plan.json", "state.json"} - {left}:
        (runs / "a" / record).write_text("damaged")
    with RunLock(RunPaths(runs / "b")):
        pass
    (runs / "b").rename(runs / "old-b")
    assert remove(runs, "a", "old-b") == 0
    assert names(runs) == ["d", "c"]


def test_a_link_to_a_run_is_not_removed_and_not_renamed(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (runs / "d").rename(runs.parent / "elsewhere")
    (runs / "d").symlink_to(runs.parent / "elsewhere")
    before = sorted(runs.iterdir())
    assert remove(runs, "d", "--force") == ExitCode.USAGE
    assert f"run d is a link. Remove the link itself: rm {runs / 'd'}" in capsys.readouterr().err
    assert sorted(runs.iterdir()) == before
    assert (runs / "d" / "plan.json").is_file()


@pytest.mark.parametrize("text", [None, "damaged", "{}"])
def test_a_cluster_s_copy_without_a_record_of_collection_is_removed_by_force_only(
    runs: Path, text: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    (runs / "a" / "inventory.json").write_text(make_cluster(make_node()).to_json())
    if text is not None:
        (runs / "a" / "mirror.json").write_text(text)
    assert remove(runs, "a") == ExitCode.USAGE
    assert "a was not collected" in capsys.readouterr().err
    assert remove(runs, "a", "--force") == 0
    assert names(runs) == ["d", "c", "b"]


@pytest.mark.parametrize(
    "arguments", [[], ["a", "--keep", "1"], ["--keep", "-1"], ["../x"], ["nothing"]]
)
def test_remove_shows_the_required_argument(runs: Path, arguments: list[str]) -> None:
    assert remove(runs, *arguments) == ExitCode.USAGE
    assert len(names(runs)) == 4


def test_a_config_is_named_with_and_without_its_option(workplace: Workplace) -> None:
    config = workplace.data.parent / "my.toml"
    config.write_text("[train]\nsteps = 7\n")
    for words in ([str(config)], ["--config", str(config)]):
        status, out, err = workplace.call("plan", *words, "--json")
        assert status == 0, err
        numbers = json.loads(out)["plan"]["arithmetic"]
        assert numbers["tokens_total"] == 7 * numbers["tokens_per_step"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["quickstart.toml"], "Did you mean"),
        (["quickstart"], "Did you mean payload/configs/quickstart.toml?"),
        (["a.toml", "--config", "b.toml"], "not allowed with argument"),
    ],
)
def test_a_missing_config_shows_what_to_type(
    workplace: Workplace, words: list[str], message: str
) -> None:
    status, _, err = workplace.call("run", *words)
    assert status == ExitCode.USAGE
    assert message in err.splitlines()[-1]


def test_plan_predicts_from_this_machine_s_measurement_where_it_is_known(
    workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned(**speeds: float) -> dict[str, Any]:
        plant_speed(tmp_path, monkeypatch, **speeds)
        words = ("--set", "precision.dtype=auto", "--json")
        status, out, err = workplace.call("plan", "--inventory", "local", *words)
        assert status == 0 and "measuring" not in err
        found: dict[str, Any] = json.loads(out)
        return found

    slow, fast = (planned(bf16_flops_per_s=each, fp32_flops_per_s=4e10) for each in (1e11, 1e12))
    date = datetime.now().date().isoformat()
    basis = fast["estimate"]["basis"]
    assert basis.endswith(f" tokens/s, measured on this machine on {date}")
    assert slow["dtype"] == fast["dtype"] == "bf16"
    assert slow["plan"]["arithmetic"]["step_s"] > fast["plan"]["arithmetic"]["step_s"]
    # The flags of the CPU do not matter.
    assert planned(bf16_flops_per_s=1e10, fp32_flops_per_s=4e10)["dtype"] == "fp32"
    # An earlier run of the same kind is still the best basis.
    ran_before(workplace)
    status, out, _ = workplace.call("plan", "--inventory", "local", *BATCH, "--json")
    assert status == 0
    assert json.loads(out)["estimate"]["basis"] == "at the 512 tokens/s of run before"


BATCH = ("--set", "batch.global_batch_size=8", "--set", "batch.micro_batch_size=1")


def ran_before(workplace: Workplace) -> RunPaths:
    """Make a finished run with this batch size and speed."""
    before = plan_stand_in(workplace.runs / "before", settings=tuple(workplace.settings()[1::2]))
    speed = Summary(
        run_id="before", status="finished", exit_class="ok", world_size=2, nodes=1,
        tokens_per_s=512.0,
    )  # fmt: skip
    write_json(before.summary, speed)
    return before


def test_plan_prints_disk_space_and_time_with_their_source(
    workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_speed(tmp_path, monkeypatch, others_share=0.9)
    status, out, _ = workplace.call("plan")
    assert status == 0
    lines = {line.split()[0]: line for line in out.splitlines() if line.startswith("  ")}
    assert "up to 4 checkpoints of 0.09 GB (" in lines["disk"] and "GB are free" in lines["disk"]
    assert "train.keep_checkpoints" in lines["disk"] and "optimizer state" in lines["disk"]
    assert "training, " in lines["duration"] and "in all (start" in lines["duration"]
    assert "from a table for CPUs with A" in lines["duration"]
    assert lines["duration"].endswith(" in bf16), not measured") or "in fp32" in lines["duration"]
    ran_before(workplace)
    status, out, _ = workplace.call("plan", *BATCH, "--json")
    assert status == 0
    found = json.loads(out)["estimate"]
    assert found["basis"] == "at the 512 tokens/s of run before"
    # 100 steps of 128 tokens, and two evaluations of 10 tokens at a third of a step's price.
    assert abs(found["time"]["training_s"] - 12_800 / 512) < 0.01
    assert abs(found["time"]["evaluation_s"] - 20 / 3 / 512) < 0.01
    assert found["seconds"] == pytest.approx(sum(found["time"].values()))


def test_a_run_with_checkpointing_or_in_another_dtype_is_no_measure_of_a_plan(
    workplace: Workplace,
) -> None:
    before = ran_before(workplace)

    def is_measured(*words: str) -> bool:
        status, out, err = workplace.call("plan", *BATCH, *words, "--json")
        assert status == 0, err
        return "of run before" in str(json.loads(out)["estimate"]["basis"])

    assert is_measured()
    assert not is_measured("--set", "memory.activation_checkpointing=on")
    checkpoint = before.checkpoint(100)
    checkpoint.mkdir(parents=True)
    expected = json.loads(workplace.call("plan", *BATCH, "--json")[1])["dtype"]
    for dtype in ("bf16", "fp32"):
        (checkpoint / "trainer.json").write_text(json.dumps({"dtype": dtype}))
        assert is_measured() is (dtype == expected)


def test_a_run_whose_checkpoints_cannot_be_read_has_no_known_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = RunPaths(tmp_path / "before")
    paths.checkpoint(100).mkdir(parents=True)
    (paths.checkpoint(100) / "trainer.json").write_text('{"dtype": "bf16"}')
    assert known_dtype(paths) == "bf16"

    def unreadable(_: Path) -> list[Path]:
        raise PermissionError

    monkeypatch.setattr("payload.run_record.run_repair.checkpoint_folders", unreadable)
    assert known_dtype(paths) is None


def test_the_default_folder_of_runs_is_no_link(
    runs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A cloned project can contain a link `runs`: its target must be named with --runs-dir."""
    clone = tmp_path / "clone"
    clone.mkdir()
    (clone / "runs").symlink_to(runs)
    monkeypatch.chdir(clone)
    for words in (["remove", "a"], ["remove", "--keep", "1"], ["list"], ["collect", "a"]):
        assert main(words, os.environ) == ExitCode.USAGE
        assert "runs in this folder is a link, which is not followed" in capsys.readouterr().err
    assert report(["a"]) == ExitCode.USAGE
    assert f"To use its target, add --runs-dir {runs}" in capsys.readouterr().err
    assert names(runs) == ["d", "c", "b", "a"]
    assert remove(Path("runs"), "a") == 0
    assert names(runs) == ["d", "c", "b"]
