"""The inventory and the result files: round trips, and the errors for damaged ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from payload.core.errors import ConfigError, ExitCode, TileforgeError
from payload.machines.inventory import Access, ClusterInventory, Node
from payload.run_record.metrics_log import EvalMetrics, read_metrics, to_json_line
from payload.run_record.run_files import (
    RankProgress,
    RunPaths,
    RunState,
    Summary,
    read_json,
    write_json,
)

SUMMARY = Summary(
    run_id="r",
    status="finished",
    exit_class="ok",
    world_size=2,
    nodes=1,
    missing_metrics=((1, 2), (5, 5)),
)
PROGRESS = RankProgress(rank=3, node="a", pid=1, step=2, phase="step", time_unix=1.0)
STATE = RunState(run_id="r", status="running", started_unix=1.0, updated_unix=2.0)


def make_inventory(num_nodes: int = 2, **changes: Any) -> ClusterInventory:
    nodes = tuple(
        Node(
            name=f"node-{i}",
            address=f"10.0.0.{i + 2}",
            physical_cores=4,
            memory_gib=64.0,
            **{"hourly_usd": 0.5, **changes},
        )
        for i in range(num_nodes)
    )
    return ClusterInventory(
        cluster="test",
        source="file",
        ssh_user="trainer",
        access=Access(kind="direct"),
        bucket=None,
        nodes=nodes,
    )


def test_an_inventory_comes_back_as_it_was_written(tmp_path: Path) -> None:
    inventory = make_inventory(host_keys=("ssh-ed25519 AAAA",))
    (tmp_path / "inventory.json").write_text(inventory.to_json())
    assert ClusterInventory.load(tmp_path / "inventory.json") == inventory


def test_the_cluster_costs_what_its_nodes_cost_or_is_not_priced() -> None:
    assert make_inventory(3).hourly_usd() == pytest.approx(1.5)
    assert make_inventory(3, hourly_usd=None).hourly_usd() is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "schema_version is 2, but this release reads 1"),
        ({"nodes": []}, "nodes is empty: at least one node is needed"),
        ({"nodes": [{"name": "a"}]}, r"nodes\[0\]: missing: address, physical_cores, memory_gib"),
        ({"nodes": ["a"]}, r"nodes\[0\]: expected an object, got 'a'"),
        ({"colour": "red"}, "unknown key 'colour'. Known: access, bucket, cluster"),
        ({"access": {"kindd": "iap"}}, "access: unknown key 'kindd'"),
        (
            {"access": {"kind": "telnet"}},
            "access: kind = 'telnet': must be one of iap, direct, local",
        ),
        ({"cluster": "../x"}, "cluster = '../x': must be a name of letters"),
        (
            {"ssh_user": "a\nProxyCommand x"},
            r"ssh_user = 'a\\nProxyCommand x': must be a login's name",
        ),
    ],
)
def test_a_wrong_inventory_is_refused_with_the_place(change: dict[str, Any], message: str) -> None:
    raw = {**json.loads(make_inventory().to_json()), **change}
    with pytest.raises(ConfigError, match=message):
        ClusterInventory.from_json(json.dumps(raw), where="inventory.json")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("name", "-oProxyCommand=x"),
        ("name", "a b"),
        ("name", ""),
        ("name", None),
        ("address", "-x"),
        ("address", "10.0.0.2\nHost *"),
        ("external_address", "$(id)"),
        ("host_keys", ["ssh-ed25519"]),
        ("host_keys", ["ssh-ed25519 AAAA\n@cert-authority * ssh-rsa BBBB"]),
        ("host_keys", [7]),
        ("host_keys", None),
    ],
)
def test_words_that_ssh_could_read_as_something_else_are_refused(key: str, value: object) -> None:
    raw = json.loads(make_inventory().to_json())
    raw["nodes"][1][key] = value
    with pytest.raises(ConfigError, match=rf"nodes\[1\]: {key}(\[0\])? = .*: must be "):
        ClusterInventory.from_json(json.dumps(raw), where="x")


@pytest.mark.parametrize(
    ("key", "value", "called"),
    [
        ("name", "node-0", "node-0"),
        ("name", "NODE-0", "node-0"),
        ("name", "10.0.0.2", "10.0.0.2"),
        ("address", "Node-0", "node-0"),
        ("address", "10.0.0.2", "10.0.0.2"),
    ],
)
def test_two_nodes_that_ssh_could_confuse_are_refused(key: str, value: str, called: str) -> None:
    raw = json.loads(make_inventory().to_json())
    raw["nodes"][1][key] = value
    with pytest.raises(ConfigError, match=f"nodes node-0 and .*: both are called '{called}'"):
        ClusterInventory.from_json(json.dumps(raw), where="x")


@pytest.mark.parametrize("cores", [0, -1, "4", True, 2.5])
def test_impossible_core_counts_are_refused(cores: object) -> None:
    raw = json.loads(make_inventory().to_json())
    raw["nodes"][1]["physical_cores"] = cores
    with pytest.raises(ConfigError, match=r"nodes\[1\]: physical_cores = "):
        ClusterInventory.from_json(json.dumps(raw), where="inventory.json")


@pytest.mark.parametrize(
    ("key", "value"), [("memory_gib", "16"), ("memory_gib", None), ("hourly_usd", "0.5")]
)
def test_numbers_that_are_none_are_refused(key: str, value: object) -> None:
    raw = json.loads(make_inventory().to_json())
    raw["nodes"][0][key] = value
    with pytest.raises(ConfigError, match=rf"nodes\[0\]: {key} = .*: must be a finite number"):
        ClusterInventory.from_json(json.dumps(raw), where="inventory.json")


def test_text_that_is_no_json_is_refused_with_its_line() -> None:
    with pytest.raises(ConfigError, match=r"x: not JSON \(line 2:"):
        ClusterInventory.from_json('{"a": 1,\n}', where="x")


def test_a_result_file_comes_back_and_is_absent_until_written(tmp_path: Path) -> None:
    summary = Summary(run_id="r", status="finished", exit_class="ok", world_size=2, nodes=1)
    assert read_json(Summary, tmp_path / "summary.json") is None
    write_json(tmp_path / "summary.json", summary)
    assert read_json(Summary, tmp_path / "summary.json") == summary
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_a_result_file_of_another_release_is_refused(tmp_path: Path) -> None:
    path = RunPaths(tmp_path).rank_progress(3)
    progress = RankProgress(rank=3, node="a", pid=1, step=2, phase="step", time_unix=0.0)
    write_json(path, progress)
    path.write_text(path.read_text().replace('"schema_version": 1', '"schema_version": 2'))
    with pytest.raises(ConfigError, match=r"rank_0003\.json: schema_version is 2"):
        read_json(RankProgress, path)


@pytest.mark.parametrize(
    ("record", "name", "value"),
    [
        (SUMMARY, "missing_metrics", [[1]]),
        (SUMMARY, "missing_metrics", [[]]),
        (SUMMARY, "missing_metrics", [[1, 2, 3]]),
        (SUMMARY, "missing_metrics", [[0, 2]]),
        (SUMMARY, "wall_s", 1.7e308),
        (SUMMARY, "restarts", -2),
        (PROGRESS, "time_unix", -1.7e308),
        (PROGRESS, "time_unix", 1.7e308),
        (PROGRESS, "monotonic_s", 1.7e308),
        (STATE, "spent_s", 1.7e308),
        (STATE, "started_unix", 1.7e308),
    ],
)
def test_ranges_and_times_that_no_run_has_are_refused_where_they_are_read(
    tmp_path: Path, record: Any, name: str, value: object
) -> None:
    path = tmp_path / "record.json"
    write_json(path, record)
    assert read_json(type(record), path) == record
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with pytest.raises(ConfigError, match=f"record.json: {name}.* must "):
        read_json(type(record), path)


def test_a_metrics_line_still_being_written_is_left_out(tmp_path: Path) -> None:
    row = to_json_line(EvalMetrics(step=1, val_loss=2.0, val_tokens=3))
    (tmp_path / "metrics.jsonl").write_text(row + row[:10])
    assert read_metrics(tmp_path / "metrics.jsonl") == [json.loads(row)]
    assert read_metrics(tmp_path / "absent.jsonl") == []


def test_every_error_class_has_an_exit_code_and_a_docstring() -> None:
    classes = [TileforgeError]
    for cls in classes:
        classes.extend(cls.__subclasses__())
        assert isinstance(cls.exit_code, ExitCode)
        assert cls.__doc__
