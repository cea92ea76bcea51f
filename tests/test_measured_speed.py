"""The measured speed of this machine: its cache, its measurement, and the plans that use it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from payload.config.run_config import parse_run_config
from payload.core.errors import ExitCode
from payload.core.python_processes import code_environment, module_command
from payload.estimates.step_time import update_s
from payload.machines.core_speed import has_bf16
from payload.machines.core_use import CoreUse
from payload.machines.rank_mesh import Mesh
from payload.machines.speed_cache import (
    ISA_VARIABLES,
    LayerSpeed,
    MachineSpeed,
    RankSpeed,
    SpeedKey,
    read_speed,
    refresh_speed,
    speed_folder,
    speed_path,
    write_speed,
)
from payload.machines.speed_process import MODULE, SOURCE, cached_speed, measured_speed
from payload.models.gpt2.spec import PRESETS
from payload.orchestrate.__main__ import main
from payload.orchestrate.machine_profiles.local_profile import LocalAccess
from tests.support.formats import assert_format
from tests.support.launching import REPO
from tests.support.machine_speed import SPEED_KEY, make_speed, plant_speed
from tests.support.waiting import DEADLINE_S

CPUINFO = "model name\t: {}\nflags\t\t: fpu {}\n"


@pytest.fixture(autouse=True)
def _measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure, unlike the other tests."""
    monkeypatch.delenv(SOURCE)


def test_a_variable_selects_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_speed(tmp_path, monkeypatch)
    said: list[str] = []
    assert cached_speed(os.environ) is not None
    monkeypatch.setenv(SOURCE, "table")
    assert cached_speed(os.environ) is None
    assert measured_speed(os.environ, now_unix=time.time(), say=said.append) is None
    assert said == []


def key_of(folder: Path, *, name: str = "X", flags: str = "avx2", **env: str) -> SpeedKey:
    (folder / "cpuinfo").write_text(CPUINFO.format(name, flags), encoding="ascii")
    key = SpeedKey.of_this_machine(env, cores=2, proc_root=folder)
    assert key is not None
    return key


def test_a_measurement_is_for_one_cpu_number_of_cores_version_and_set_of_variables(
    tmp_path: Path,
) -> None:
    first = key_of(tmp_path)
    others = [
        key_of(tmp_path, name="Y"),
        key_of(tmp_path, flags="avx2 amx_bf16"),
        *(key_of(tmp_path, **{name: "AVX2"}) for name in ISA_VARIABLES),
        replace(first, cores=4),
        replace(first, torch="0"),
    ]
    assert len({each.sha256() for each in (first, *others)}) == len(others) + 1
    assert key_of(tmp_path, flags="avx2", HOME="/elsewhere") == first
    write_speed(tmp_path, first, make_speed(first))
    assert read_speed(tmp_path, first) == make_speed(first)
    assert [read_speed(tmp_path, each) for each in others] == [None] * len(others)
    # A file under another machine's name is not used either.
    speed_path(tmp_path, first).rename(speed_path(tmp_path, others[0]))
    assert read_speed(tmp_path, others[0]) is None


def test_the_format_of_a_measurement_is_the_stored_one() -> None:
    layers = (LayerSpeed(threads=2, element_s=3e-9, weight_s=2e-9, layer_s=1e-3),)
    assert_format("speed", [asdict(make_speed(layers=layers))])


def test_layers_are_measured_for_ranks_of_one_core_and_of_all_cores() -> None:
    one = LayerSpeed(threads=1, element_s=5e-9, weight_s=10e-9, layer_s=1e-3)
    two = LayerSpeed(threads=2, element_s=3e-9, weight_s=6e-9, layer_s=2e-3)
    speed = make_speed(layers=(two, one))
    assert speed.rank_speed("bf16", threads=1) == RankSpeed(update_core_s=2e-9, layers=one)
    assert speed.layer_speed("bf16", threads=2) == two
    # Four threads are twice as fast as two, but one of them runs Python.
    scaled = speed.layer_speed("bf16", threads=4)
    assert scaled == LayerSpeed(threads=4, element_s=1.5e-9, weight_s=3e-9, layer_s=2e-3)
    # They were measured in the dtype that a run chooses on this machine.
    assert speed.layer_speed("fp32", threads=2) is None
    assert make_speed().layer_speed("bf16", threads=2) is None


def test_a_damaged_measurement_counts_as_missing(tmp_path: Path) -> None:
    write_speed(tmp_path, SPEED_KEY, make_speed())
    path = speed_path(tmp_path, SPEED_KEY)
    text = path.read_text(encoding="utf-8")
    changes: list[tuple[str, Any]] = [
        *(("schema_version", each) for each in (1, None)),
        *(("layers", None), ("layers", [{}]), ("layers", [{"threads": 0}])),
        *(("bf16_flops_per_s", each) for each in (0, -1, "1e12", float("nan"))),
        *(("update_core_s", 0), ("others_share", 2), ("measured_unix", -1)),
    ]
    damaged = [json.dumps({**json.loads(text), key: value}) for key, value in changes]
    for each in ("", "[]", "{}", text[:-40], *damaged):
        path.write_text(each, encoding="utf-8")
        assert read_speed(tmp_path, SPEED_KEY) is None, each
    path.unlink()
    path.mkdir()
    assert read_speed(tmp_path, SPEED_KEY) is None


@pytest.mark.processes
def test_a_reader_beside_two_writers_finds_a_whole_measurement(tmp_path: Path) -> None:
    write_speed(tmp_path, SPEED_KEY, make_speed())
    program = (
        "import sys; from pathlib import Path\n"
        "from tests.support.machine_speed import SPEED_KEY, make_speed\n"
        "from payload.machines.speed_cache import write_speed\n"
        "for i in range(200): write_speed(Path(sys.argv[1]), SPEED_KEY, make_speed(cores=i + 1))"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    writers = [subprocess.Popen(command, cwd=REPO) for _ in range(2)]
    while any(each.poll() is None for each in writers):
        assert read_speed(tmp_path, SPEED_KEY) is not None
    assert [each.returncode for each in writers] == [0, 0]
    assert [path.name for path in tmp_path.iterdir()] == [speed_path(tmp_path, SPEED_KEY).name]


def test_a_measurement_beside_other_programs_is_not_used_and_is_repeated_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds, key = plant_speed(tmp_path, monkeypatch, others_share=0.5)
    said: list[str] = []
    assert cached_speed(os.environ) is None
    # No measurement is started: the machine was busy just now.
    assert measured_speed(os.environ, now_unix=time.time(), say=said.append) is None
    assert said == []
    busy = read_speed(speeds, key)
    assert busy is not None
    assert busy.is_current(busy.measured_unix + 599)
    assert not busy.is_current(busy.measured_unix + 601)
    # Another command measured while this one waited.
    assert busy.is_current(busy.measured_unix - 20)
    assert make_speed().is_current(time.time())


@pytest.mark.processes
def test_a_measurement_that_fails_is_reported_and_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken" / "torch").mkdir(parents=True)
    (tmp_path / "broken" / "torch" / "__init__.py").write_text("raise ImportError('no libgomp')")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    said: list[str] = []
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "broken")}
    assert measured_speed(env, now_unix=time.time(), say=said.append) is None
    begins, failed = said
    assert begins == "measuring the speed of this machine, once: a few seconds"
    assert failed.startswith("note: the speed of this machine is not measured: ")
    assert failed.endswith("no libgomp.")


def test_a_run_refreshes_the_speed_in_its_dtype_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    key = SpeedKey.of_this_machine(os.environ, cores=3)
    assert key is not None

    def refreshed() -> MachineSpeed | None:
        refresh_speed(os.environ, cores=3, dtype="fp32", flops_per_s=5e11, now_unix=2e9)
        return read_speed(speed_folder(os.environ), key)

    assert refreshed() is None  # a run has not measured everything
    known = make_speed(key)
    write_speed(speed_folder(os.environ), key, known)
    assert refreshed() == replace(known, fp32_flops_per_s=5e11, measured_unix=2e9)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a file"))
    (tmp_path / "a file").touch()
    assert refreshed() is None


@pytest.mark.usefixtures("one_thread")
def test_only_a_run_on_idle_cores_of_one_machine_refreshes_the_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch takes seconds to import, and most of these tests do not need it.
    from payload.train.gemm_and_network_benchmark import Calibration
    from payload.train.ranks.world import World
    from payload.train.speed_refresh import refresh_known_speed

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    key = SpeedKey.of_this_machine(os.environ, cores=1)
    assert key is not None
    write_speed(speed_folder(os.environ), key, make_speed(key))
    world = World(rank=0, world_size=1, local_rank=0, local_world_size=1, node="here")
    calibration = Calibration(
        dtype="bf16", reason="", peak_flops_per_s=3e12, all_reduce_bytes_per_s=None
    )

    def refreshed(world: World, others_share: float) -> bool:
        refresh_known_speed(calibration, world, others_share=others_share)
        return read_speed(speed_folder(os.environ), key) != make_speed(key)

    assert not refreshed(world, 0.5)
    assert not refreshed(replace(world, kind="cuda"), 0.0)
    assert not refreshed(replace(world, world_size=2), 0.0)  # a rank on each of two machines
    assert refreshed(world, 0.1)


def test_other_programs_are_the_busy_time_of_the_cores_without_this_process(
    tmp_path: Path,
) -> None:
    stat, ticks = tmp_path / "stat", os.sysconf("SC_CLK_TCK")

    def write(busy: int) -> None:
        row = f"{busy} 0 0 1000 0 0 0 0 0 0"
        stat.write_text(f"cpu {row}\ncpu0 {row}\ncpu1 {row}\ncpu10 9{row}\n", encoding="ascii")

    write(0)
    idle, one, both = (CoreUse(cores, stat=stat) for cores in ({0, 1}, {0}, {0, 1}))
    assert idle.others() == 0.0
    write(1000 * ticks)
    assert one.others() == both.others() == 1.0
    assert CoreUse({0}, stat=tmp_path / "none").others() == 0.0
    # Cores that are not among these do not count.
    other = CoreUse({5}, stat=stat)
    write(2000 * ticks)
    assert other.others() == 0.0


def test_a_local_run_has_the_measured_speed_of_the_cores_that_it_uses() -> None:
    plain = LocalAccess({})
    known = plain.with_speed(make_speed(measured_unix=1_800_000_000.0))
    assert known.peak_flops_per_s("bf16", threads=1) == 5e11
    assert known.peak_flops_per_s("bf16", threads=2) == 1e12
    # More threads than cores are not faster.
    assert known.peak_flops_per_s("bf16", threads=4) == 1e12
    assert known.peak_flops_per_s("fp32", threads=2) == 4e11
    assert known.speed_source().startswith("measured on this machine on 2027-01-1")
    assert (
        plain.peak_flops_per_s("bf16", threads=2) is None and "from a table" in plain.speed_source()
    )


@pytest.mark.parametrize(("bf16", "fp32", "dtype"), [(16e10, 32e10, "fp32"), (2e12, 3e11, "bf16")])
def test_the_measured_speeds_choose_the_dtype_and_not_the_flags(
    bf16: float, fp32: float, dtype: str
) -> None:
    speed = make_speed(bf16_flops_per_s=bf16, fp32_flops_per_s=fp32)
    access = LocalAccess({}).with_speed(speed)
    assert access.dtype("auto") == dtype
    assert access.dtype("bf16") == "bf16"


def test_an_update_takes_the_measured_time() -> None:
    config, mesh = parse_run_config("", where="test"), Mesh(replicate=1, shard=1)
    spec = PRESETS["gpt2"]
    for threads in (1, 2, 32):
        speed = RankSpeed(update_core_s=1e-9, layers=None)
        found = update_s(config, spec, mesh, threads=threads, speed=speed)
        assert found == pytest.approx(spec.num_params() * 1e-9 / threads)


@pytest.mark.processes
@pytest.mark.slow
def test_two_commands_at_once_measure_once(tmp_path: Path) -> None:
    env = {**code_environment(os.environ), "XDG_CACHE_HOME": str(tmp_path)}
    program = (
        "import os, time; from payload.machines.speed_process import measured_speed\n"
        "measured_speed(os.environ, now_unix=time.time(), say=print)"
    )
    pair = [
        subprocess.Popen([sys.executable, "-c", program], env=env, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    said = b"".join(each.communicate(timeout=DEADLINE_S)[0] for each in pair)
    assert said.count(b"measuring the speed of this machine") == 1
    assert len([*(tmp_path / "tileforge" / "speed").glob("*.json")]) == 1


@pytest.mark.slow
@pytest.mark.processes
def test_the_measurement_is_printed_and_cached(tmp_path: Path) -> None:
    env = {**code_environment(os.environ), "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        module_command(MODULE), env=env, capture_output=True, check=True, timeout=DEADLINE_S
    )
    key = SpeedKey.of_this_machine(env)
    assert key is not None
    found = read_speed(speed_folder(env), key)
    assert found is not None
    assert json.loads(done.stdout) == json.loads(json.dumps(asdict(found)))
    assert found.cores == key.cores and found.measured_unix > 1.7e9


def test_an_error_of_a_plan_comes_before_the_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    settings = ("batch.global_batch_size=3", "batch.micro_batch_size=2", "device.kind=cpu")
    words = [word for each in settings for word in ("--set", each)]
    assert main(["plan", *words], os.environ) == ExitCode.CONFIG
    said = capsys.readouterr().err
    assert "batch.global_batch_size" in said and "measuring the speed" not in said


@pytest.mark.seeds
@pytest.mark.processes
@pytest.mark.slow
def test_domains_are_measured_at_the_same_time() -> None:
    # Both domains have the same core where only one is usable.
    cores = sorted(os.sched_getaffinity(0))
    pair = (cores[0], cores[-1])
    program = (
        "from payload.machines.machine import Domain\n"
        "from payload.train.measure_machine import measure\n"
        f"found = measure([Domain(id=i, cores=(core,)) for i, core in enumerate({pair})])\n"
        "assert len(found) == 2 and all(each.bf16 > 0 < each.updates_per_s for each in found)\n"
        "try: measure([Domain(id=0, cores=(0,)), Domain(id=1, cores=(10**6,))])\n"
        "except Exception as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=code_environment(os.environ),
        capture_output=True,
        check=True,
        timeout=DEADLINE_S,
    )
    assert b"a process of the measurement failed. Run it again." in done.stdout


@pytest.mark.processes
@pytest.mark.slow
def test_layers_are_measured_on_all_cores_of_a_domain_and_on_each_core() -> None:
    cores = sorted(os.sched_getaffinity(0))
    pair = (cores[0], cores[-1])
    program = (
        "from payload.machines.machine import Domain\n"
        "from payload.train.measure_machine import with_layers\n"
        "from tests.support.machine_speed import make_speed\n"
        # Layers in bf16 that the CPU emulates take minutes; no plan needs their speed.
        f"speed = make_speed(cores=2, bf16_flops_per_s={1e10 if has_bf16() is False else 1e12})\n"
        f"found = with_layers(speed, [Domain(id=0, cores={pair})])\n"
        "print([each.threads for each in found.layers])\n"
        "assert all(each.element_s + each.weight_s > 0 for each in found.layers), found\n"
        "assert all(each.layer_s > 0 for each in found.layers), found\n"
        "assert 0 <= found.others_share <= 1"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=code_environment(os.environ),
        cwd=REPO,
        capture_output=True,
        check=False,
        timeout=DEADLINE_S,
        text=True,
    )
    assert done.stdout == "[2, 1]\n", done.stderr
