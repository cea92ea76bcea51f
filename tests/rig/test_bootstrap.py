"""Machines that cloud-init prepares from the rendered user-data, and one whose bootstrap fails."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from payload import __version__
from payload.stack.node_paths import BOOTSTRAP_STATE
from tests.infra.stacks import CASES, deploy
from tests.rig import prepared
from tests.rig.access import ssh
from tests.rig.host import run
from tests.rig.machine import Machine
from tests.rig.prepared import FILES, node_user_data
from tests.rig.rig import Rig
from tests.support.waiting import DEADLINE_S

pytestmark = [pytest.mark.rig, pytest.mark.timeout(1800)]

LOG = "/var/log/tileforge-bootstrap.log"
SETUP = ["bash", "/usr/local/lib/tileforge/node-setup.sh"]


@pytest.fixture
def rig(from_nothing: Rig) -> Rig:
    return from_nothing


@pytest.fixture
def ready(rig: Rig) -> Machine:
    return rig.machines[0]


@pytest.fixture
def failed(rig: Rig) -> Machine:
    """Return the machine that requested a package that does not exist."""
    return rig.machines[3]


def public(key: Path) -> str:
    return key.with_suffix(".pub").read_text(encoding="utf-8")


def mode_and_owner(machine: Machine, path: str) -> str:
    return machine.exec(["stat", "--format=%a %U", path]).stdout.strip()


def test_a_machine_becomes_ready_from_nothing(ready: Machine) -> None:
    assert ready.bootstrap_state() == {
        "schema_version": 1,
        "step": "done",
        "ok": True,
        "reason": None,
        "version": __version__,
        "sha": FILES.lock_sha(),
    }
    assert ready.exec(["cloud-init", "status", "--wait"]).stdout.strip() == "status: done"
    assert ready.exec(["systemctl", "is-system-running"]).stdout.strip() == "running"


def test_it_boots_from_exactly_what_the_default_stack_gives_its_nodes(
    ready: Machine, operator_key: Path, tmp_path: Path
) -> None:
    stack = deploy({}, folder=tmp_path, public_key=public(operator_key).strip())
    booted = (ready.root / "var/lib/cloud/seed/nocloud/user-data").read_text(encoding="utf-8")
    assert [node["metadata"]["user-data"] for node in stack.of_type("Instance")] == [booted] * 3


def test_without_an_index_a_machine_takes_its_wheelhouse(rig: Rig, ready: Machine) -> None:
    freeze = ["/opt/tileforge/venv/bin/python", "-m", "pip", "freeze"]
    with_folder = rig.machines[2]
    assert not (with_folder.root / "etc/pip.conf").exists()
    assert with_folder.exec(freeze).stdout == ready.exec(freeze).stdout
    assert "using the default package index" not in (with_folder.root / LOG[1:]).read_text()
    assert "using the default package index" in (ready.root / LOG[1:]).read_text()


def test_the_trainer_has_torch_and_mpirun(rig: Rig, ready: Machine, operator_key: Path) -> None:
    program = "python -c 'import torch; print(torch.ones(2).sum().item())'; mpirun -n 2 hostname"
    program = f"export PATH=/opt/tileforge/venv/bin:$PATH; {program}"
    done = ssh(rig, ready, program, key=operator_key)
    assert done.stdout == "2.0\nnode-0\nnode-0\n", done.stderr


def test_what_torch_compile_and_the_kernels_build_with_is_there(ready: Machine) -> None:
    """Inductor's C++ includes Python.h and uses OpenMP; tests/train compiles a model."""
    program = "#include <Python.h>\n#include <omp.h>\nint count = omp_get_max_threads();\n"
    (ready.root / "var/tmp/x.cpp").write_text(program, encoding="ascii")
    asked = "import sysconfig; print(sysconfig.get_paths()['include'])"
    include = ready.exec(["/opt/tileforge/venv/bin/python", "-c", asked]).stdout.strip()
    build = ["g++", "-shared", "-fPIC", "-fopenmp", f"-I{include}", "/var/tmp/x.cpp"]
    ready.exec([*build, "-o", "/var/tmp/x.so"])
    assert (ready.root / "var/tmp/x.so").exists()


def test_a_session_of_the_trainer_has_the_limits(
    rig: Rig, ready: Machine, operator_key: Path
) -> None:
    done = ssh(rig, ready, "ulimit -S -s; ulimit -H -s; ulimit -l; ulimit -n", key=operator_key)
    stack, stack_hard, memlock, files = done.stdout.split()
    assert (stack, stack_hard) == ("65536", "unlimited")
    capabilities = ready.exec(["grep", "CapBnd", "/proc/1/status"]).stdout.split()[1]
    # A guest without CAP_SYS_RESOURCE (24) and its machines cannot raise these two.
    if int(capabilities, 16) >> 24 & 1:
        assert (memlock, files) == ("unlimited", "1048576")


def test_the_network_has_large_windows(ready: Machine) -> None:
    windows = ready.exec(["sysctl", "-n", "net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem"]).stdout
    assert [line.split()[-1] for line in windows.splitlines()] == ["33554432", "33554432"]


@pytest.mark.parametrize(
    ("user", "options"),
    [
        ("root", ()),
        ("trainer", ("-o", "PubkeyAuthentication=no")),
    ],
)
def test_who_has_no_key_is_refused(
    rig: Rig, ready: Machine, operator_key: Path, user: str, options: tuple[str, ...]
) -> None:
    done = ssh(rig, ready, "true", key=operator_key, user=user, options=options)
    assert done.returncode == 255
    # In brackets: the methods that sshd offers, without a password.
    assert "Permission denied (publickey)." in done.stderr


def test_another_key_is_refused(rig: Rig, ready: Machine, tmp_path: Path) -> None:
    run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "id"])
    done = ssh(rig, ready, "true", key=tmp_path / "id")
    assert "Permission denied (publickey)." in done.stderr


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (BOOTSTRAP_STATE, "644 root"),
        (LOG, "640 root"),
        ("/etc/tileforge/bootstrap.conf", "644 root"),
        ("/usr/local/lib/tileforge/node-setup.sh", "755 root"),
        ("/usr/local/lib/tileforge/requirements.lock", "644 root"),
        ("/home/trainer", "750 trainer"),
        ("/home/trainer/.ssh", "700 trainer"),
        ("/home/trainer/.ssh/authorized_keys", "600 trainer"),
        ("/opt/tileforge/venv", "755 trainer"),
        ("/var/lib/systemd/linger/trainer", "644 root"),
    ],
)
def test_a_file_has_its_owner_and_mode(ready: Machine, path: str, expected: str) -> None:
    assert mode_and_owner(ready, path) == expected


def test_a_second_run_changes_nothing(ready: Machine) -> None:
    before = ready.bootstrap_state()
    ready.exec(["touch", "/var/lib/mark"])
    ready.exec(SETUP, timeout_s=DEADLINE_S)
    find = ["find", "/", "-xdev", "-newer", "/var/lib/mark", "-type", "f"]
    changed = ready.exec([*find, "-not", "-path", "/var/log/journal/*"]).stdout.split()
    assert sorted(changed) == [BOOTSTRAP_STATE, LOG]
    assert ready.bootstrap_state() == before


def test_a_busy_package_manager_is_waited_for(ready: Machine) -> None:
    ready.exec(["apt-get", "-qq", "remove", "numactl"])
    hold = "import fcntl, time; f = open('/var/lib/dpkg/lock-frontend', 'w'); fcntl.lockf(f, 2)"
    hold += "; open('/run/held', 'w').close(); time.sleep(5)"
    ready.exec(["systemd-run", "--unit=holder", "python3", "-c", hold])
    ready.exec(["sh", "-c", "until [ -e /run/held ]; do sleep 0.1; done"])
    install = ready.exec(["apt-get", "-qq", "install", "numactl"], check=False)
    assert "Could not get lock" in install.stderr
    ready.exec(SETUP, timeout_s=DEADLINE_S)
    assert (ready.root / "usr/bin/numactl").exists()


def test_automatic_updates_are_on_again(ready: Machine, failed: Machine) -> None:
    for machine in (ready, failed):
        timers = ["systemctl", "is-active", "apt-daily.timer", "apt-daily-upgrade.timer"]
        assert machine.exec(timers).stdout.split() == ["active", "active"]


def test_a_failing_step_is_named_with_the_end_of_its_log(failed: Machine) -> None:
    state: Mapping[str, Any] = failed.bootstrap_state() or {}
    assert (state["step"], state["ok"]) == ("packages", False)
    assert "Unable to locate package no-such-package" in state["reason"]
    assert mode_and_owner(failed, BOOTSTRAP_STATE) == "644 root"
    assert not (failed.root / "opt/tileforge").exists()


@pytest.mark.parametrize("case", ["default", "oslogin", "no-nat"])
def test_cloud_init_finds_the_user_data_of_a_stack_valid(
    ready: Machine, case: str, tmp_path: Path
) -> None:
    stack = deploy(CASES[case], folder=tmp_path)
    text = stack.of_type("Instance")[0]["metadata"]["user-data"]
    (ready.root / "var/tmp/user-data").write_text(text, encoding="utf-8")
    schema = ["cloud-init", "schema", "--config-file", "/var/tmp/user-data"]
    assert "Valid cloud-config" in ready.exec(schema).stdout


def test_no_private_key_is_where_bootstrap_writes(ready: Machine) -> None:
    folders = ["/var/lib/cloud", "/var/log", "/etc/tileforge", "/var/lib/tileforge"]
    folders += ["/home/trainer", "/usr/local/lib/tileforge"]
    search = ["grep", "-rlE", "PRIVATE KEY|BEGIN CERTIFICATE", *folders]
    assert ready.exec(search, check=False).stdout == ""


def test_on_a_prepared_disk_a_machine_is_soon_ready_with_keys_of_its_own(
    operator_key: Path,
) -> None:
    text = node_user_data(public(operator_key))
    os_login = node_user_data("", os_login_user="ada_example_com")
    with Rig([text, text, os_login], layers=[prepared.layer()], wheels=()) as rig:
        states = rig.wait_for_bootstrap(timeout_s=DEADLINE_S)
        assert [state["ok"] for state in states.values()] == [True, True, True]
        assert rig.machines[0].host_keys() != rig.machines[1].host_keys()
        done = ssh(rig, rig.machines[1], "hostname; id -un", key=operator_key)
        assert done.stdout == "node-1\ntrainer\n", done.stderr
        # Google's agent would make the user; sshd already admits only this user.
        assert "allowusers ada_example_com\n" in rig.machines[2].exec(["sshd", "-T"]).stdout
        assert (rig.machines[2].root / "var/lib/systemd/linger/ada_example_com").exists()
        keys = rig.machines[2].root / "home/trainer/.ssh/authorized_keys"
        assert keys.read_text(encoding="utf-8").strip() == ""
        assert "Permission denied" in ssh(rig, rig.machines[2], "true", key=operator_key).stderr
