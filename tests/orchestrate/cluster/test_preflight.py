"""`preflight` over nodes with separate networks: real sshd, mpirun, gloo, and faults."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

import pytest

from payload.core.errors import ExitCode
from payload.orchestrate.findings.nodes import PROBED, TRIED
from payload.orchestrate.findings.trial import record_path
from payload.stack.node_paths import VENV
from tests.orchestrate.cluster.separate import SeparateNodes
from tests.support.formats import assert_format, keys_of
from tests.support.launching import REPO
from tests.support.waiting import DEADLINE_S

pytestmark = [pytest.mark.sshd, pytest.mark.ranks]


class Operator:
    """A folder of the operator's, on the nodes' network."""

    def __init__(self, folder: Path, nodes: SeparateNodes) -> None:
        folder.mkdir()
        self.folder = folder
        self.nodes = nodes
        self.inventory = nodes.write_inventory(folder / "inventory.json")

    def do(self, command: str, *arguments: str) -> tuple[int, dict[str, Any], str]:
        """Run an orchestrate command; return its exit code, its JSON, and its other output."""
        words = ["-m", "payload.orchestrate", command, "--inventory", str(self.inventory), "--json"]
        done = subprocess.run(
            [*self.nodes.inside, sys.executable, *words, *arguments],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": f"{REPO}:{os.environ.get('PYTHONPATH', '')}"},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout), done.stderr

    def preflight(self, *arguments: str) -> tuple[int, dict[str, Any], str]:
        """`preflight` with the key that the nodes know."""
        return self.do("preflight", "--ssh-key", str(self.nodes.key), *arguments)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeparateNodes]:
    """Three nodes that the tests of this module share and leave unchanged."""
    with SeparateNodes(tmp_path_factory.mktemp("cluster"), num_nodes=3, linked=True) as nodes:
        yield nodes


@pytest.fixture
def operator(nodes: SeparateNodes, tmp_path: Path) -> Operator:
    return Operator(tmp_path / "operator", nodes)


def errors(report: dict[str, Any]) -> dict[str, str]:
    """Causes by node and check."""
    found = [finding for finding in report["findings"] if finding["severity"] == "error"]
    return {f"{finding['node']} {finding['check']}": finding["cause"] for finding in found}


def warnings(report: dict[str, Any], check: str) -> dict[str, str]:
    """Causes by node."""
    found = [f for f in report["findings"] if (f["severity"], f["check"]) == ("warning", check)]
    return {finding["node"]: finding["cause"] for finding in found}


def assert_nothing_is_left(nodes: SeparateNodes) -> None:
    """Assert that no process and no key of the trial is left."""
    assert not nodes.processes()
    for i in range(3):
        ssh = nodes.home_of(i) / ".ssh"
        assert "tileforge-run:" not in (ssh / "authorized_keys").read_text(encoding="ascii")
        assert not list(ssh.glob("tileforge/*"))


@contextmanager
def mounted(nodes: SeparateNodes, i: int, *mount: str | PurePath) -> Iterator[None]:
    """Replace a node's file or folder, the last argument, for a while."""
    nodes.within(i, "mount", *map(str, mount))
    try:
        yield
    finally:
        nodes.within(i, "umount", str(mount[-1]))


def test_mpirun_and_gloo_are_tried_and_measured_and_plan_uses_the_figures(
    nodes: SeparateNodes, operator: Operator
) -> None:
    code, plan, said = operator.do("plan", "--set", "batch.global_batch_size=12")
    assert code == ExitCode.OK and "a network of 10 Gbit/s" in said, said
    assert plan["plan"]["arithmetic"]["compute_s"] is None
    code, report, said = operator.preflight()
    assert code == ExitCode.OK and "every node is fit for a run" in said, report
    for i in range(3):
        checks = report["nodes"][f"node-{i}"]["checks"]
        assert not {checks[name] for name in (*PROBED, "mpirun", *TRIED)} & {"-", "error"}
    # The operator's machine is on the nodes' network, but is not a node.
    exposed = warnings(report, "ports")
    assert list(exposed) == ["node-0"]
    assert re.search(r"is not a node, but can connect to port [23]\d{4} ", exposed["node-0"])
    measured = report["measured"]
    assert measured["world_size"] == 3 and list(measured["nodes"]) == ["node-0", "node-1", "node-2"]
    for speed in measured["nodes"].values():
        assert min(speed["bf16_flops_per_s"], speed["fp32_flops_per_s"]) > 1e8
        assert speed["received_bytes_per_s"] > 1e6
    assert_nothing_is_left(nodes)
    # The measured values replace the assumed ones.
    code, plan, said = operator.do("plan", "--set", "batch.global_batch_size=12")
    assert code == ExitCode.OK and "measured by preflight" in said, said
    numbers = plan["plan"]["arithmetic"]
    grad_bytes = numbers["grad_bytes"]
    assert numbers["sync_s"] == pytest.approx(grad_bytes / measured["all_reduce_bytes_per_s"])
    assert numbers["compute_s"] > 0
    assert plan["plan"]["interfaces"] == dict.fromkeys(measured["nodes"], "ens4")
    assert plan["hosts"].split() == [node.address for node in nodes.inventory.nodes]
    hosts = ["-f", f"{plan_dir(plan)}/hosts"]
    assert plan["plan"]["argv"][:4] == [f"{VENV}/bin/mpirun", "-noconf", *hosts]
    maps = ("nodes", "nodes{}.checks", "measured.nodes")
    unknown = {path: "null" for path in keys_of([report], maps=maps) if ".facts." in path}
    assert_format("output.preflight", [report], maps=maps, also=unknown)
    assert [rank["node"] for rank in plan["ranks"]] == list(measured["nodes"])


def plan_dir(plan: dict[str, Any]) -> str:
    """The run folder on the nodes."""
    return str(plan["plan"]["environment"]["TILEFORGE_RUN_DIR"])


def test_a_link_of_1_mbit_per_s_is_a_warning_that_names_its_node_and_the_time_per_step(
    nodes: SeparateNodes, operator: Operator
) -> None:
    nodes.links[2].limit(1)
    try:
        code, report, _ = operator.preflight("--set", "batch.global_batch_size=36")
    finally:
        nodes.links[2].unlimit()
    assert code == ExitCode.OK, report
    slow = warnings(report, "gloo")
    assert list(slow) == ["node-2"], slow
    assert "its link is slow, " in slow["node-2"] and "Mbit/s: predicted" in slow["node-2"]
    assert "s of synchronisation a step beside" in slow["node-2"]
    assert "124M parameters, 36 sequences of 1024 tokens a step" in slow["node-2"]
    speed = report["measured"]["nodes"]["node-2"]["received_bytes_per_s"]
    assert speed * 8 < 1.5e6
    # Three ranks send each byte 4/3 times.
    assert report["measured"]["all_reduce_bytes_per_s"] * 4 / 3 * 8 < 1.5e6
    assert_nothing_is_left(nodes)


def test_no_amx_a_full_disk_a_wrong_clock_and_a_mute_resolver_are_named_and_nothing_is_tried(
    nodes: SeparateNodes, operator: Operator, tmp_path: Path
) -> None:
    text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    flags = "flags\t\t: fpu avx512f"
    masked = "\n".join(flags if line.startswith("flags") else line for line in text.splitlines())
    (tmp_path / "without").write_text(masked, encoding="ascii")
    (tmp_path / "with").write_text(masked.replace("fpu", "fpu amx_bf16 amx_tile"), encoding="ascii")
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    (bin_dir / "python3").write_text(AHEAD.format(sys.executable), encoding="utf-8")
    (bin_dir / "python3").chmod(0o755)
    over = ("-t", "overlay", "-o", f"lowerdir={bin_dir}:/usr/local/bin", "overlay")
    small = ("-t", "tmpfs", "-o", "size=64m", "tmpfs")
    (tmp_path / "mute").write_text("nameserver 10.255.255.53\n", encoding="ascii")
    with (
        mounted(nodes, 0, "--bind", tmp_path / "with", "/proc/cpuinfo"),
        mounted(nodes, 0, "--bind", tmp_path / "mute", "/etc/resolv.conf"),
        mounted(nodes, 1, "--bind", tmp_path / "without", "/proc/cpuinfo"),
        mounted(nodes, 1, *small, nodes.home),
        mounted(nodes, 2, *over, "/usr/local/bin"),
    ):
        keys = (nodes.home_of(1) / ".ssh" / "authorized_keys").read_text(encoding="ascii")
        write = 'mkdir -m 700 "$1/.ssh" && echo "$2" >"$1/.ssh/authorized_keys"'
        nodes.within(1, "sh", "-c", write, "sh", str(nodes.home), keys.strip())
        code, report, said = operator.preflight()
    assert code == ExitCode.PREFLIGHT
    assert "node-0" not in warnings(report, "cpu")
    assert list(warnings(report, "name")) == ["node-0"]
    assert warnings(report, "cpu")["node-1"].startswith("its CPU shows no AMX")
    found = errors(report)
    assert found["node-1 disk"] == f"0.1 GiB are free in {nodes.home}"
    assert found["node-2 clock"] == "its clock is 1 h ahead of the clock of this machine"
    assert "error: 2 of 3 node(s) not fit: node-1, node-2" in said
    assert report["measured"] is None and report["nodes"]["node-0"]["checks"]["mpirun"] == "-"
    assert "nothing was started or measured" in report["notes"][0]
    assert not record_path(operator.folder, cluster="test").exists()


# Replaces the interpreter of a program on stdin.
AHEAD = """\
#!{}
import sys, time
real = time.time
time.time = lambda: real() + 3600
start = sys.argv[3]
del sys.argv[1:4]
exec(compile(start, "program", "exec"), {{"__name__": "__main__"}})
"""


def test_a_library_missing_on_a_node_is_31_and_the_key_is_removed(
    nodes: SeparateNodes, operator: Operator, tmp_path: Path
) -> None:
    (tmp_path / "not-executable").touch(mode=0o644)
    helper = VENV / "bin" / "hydra_bstrap_proxy"
    with mounted(nodes, 2, "--bind", tmp_path / "not-executable", helper):
        code, report, _ = operator.preflight()
    assert code == ExitCode.PREFLIGHT
    cause = "mpirun's helper hydra_bstrap_proxy cannot be run on this node"
    assert errors(report) == {"node-2 mpirun": cause}
    assert_nothing_is_left(nodes)
    lock = nodes.home_of(2) / ".ssh" / ".tileforge.lock"
    lock.unlink()
    lock.mkdir()
    try:
        code, report, _ = operator.preflight()
    finally:
        lock.rmdir()
    # Removing the key on it fails as well, but is not the cause.
    cause = "the trial failed: installing the run's key failed on 1 node(s)"
    assert errors(report) == {"node-0 mpirun": cause}
    # The head keeps the key's name, without the key, until a later command has reached node 2.
    (kept,) = (nodes.home_of(0) / ".ssh" / "tileforge").iterdir()
    assert not list(kept.iterdir())
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    libraries = VENV / "lib" / version / "site-packages" / "torch" / "lib"
    with mounted(nodes, 1, "-t", "tmpfs", "tmpfs", libraries):
        code, report, _ = operator.preflight()
    assert code == ExitCode.PREFLIGHT
    (cause,) = errors(report).values()
    assert list(errors(report)) == ["node-1 payload"]
    assert cause.startswith("its environment lacks the library libtorch")
    assert_nothing_is_left(nodes)
