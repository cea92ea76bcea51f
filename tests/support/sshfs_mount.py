"""A mounted folder whose server a test stops."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.waiting import wait_until

SFTP_SERVER = Path("/usr/lib/openssh/sftp-server")


@contextmanager
def sshfs_mount(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """Mount a folder by sshfs from a new server; yield the folder and the server's process."""
    if os.geteuid() != 0 or not shutil.which("sshfs") or not SFTP_SERVER.exists():
        pytest.skip("needs root, sshfs and sftp-server; make test-packages installs them")
    here, there = tmp_path / "mounted", tmp_path / "exported"
    for each in (here, there):
        each.mkdir()
    # sshfs uses this program instead of ssh.
    as_ssh, pid_file = tmp_path / "as-ssh", tmp_path / "pid"
    as_ssh.write_text(f"#!/bin/sh\necho $$ >{pid_file}\nexec {SFTP_SERVER}\n", encoding="ascii")
    as_ssh.chmod(0o755)
    options = f"ssh_command={as_ssh},dir_cache=no"
    client = subprocess.Popen(["sshfs", "-f", "-o", options, f"nobody:{there}", here])
    try:
        wait_until(here.is_mount, what="the mount")
        yield here, int(pid_file.read_text(encoding="ascii"))
    finally:
        subprocess.run(["umount", "--lazy", here], check=False)
        client.kill()
        client.wait()


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process, like a frozen machine; its connections stay open."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
