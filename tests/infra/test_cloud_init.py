"""User-data: golden text, refused values, and no secrets."""

from __future__ import annotations

import base64
import gzip
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.cloud_init import MAX_BYTES, BootstrapFiles, NodeBootstrap, render_user_data
from payload.core.errors import ConfigError
from tests.infra.stacks import KEY as STACK_KEY
from tests.infra.stacks import deploy
from tests.rig.prepared import node_user_data
from tests.support.golden_files import assert_golden

BOOTSTRAP = Path(__file__).resolve().parents[2] / "bootstrap"
FILES = BootstrapFiles.load(BOOTSTRAP)
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIDQC5oFuLD7OiNkh4CSiD2bpP7Kvt2AR4GIGfBKesYne"
NODE = NodeBootstrap(authorized_keys=(f"{KEY} operator", f"{KEY} run"), version="0.1.0")

_PACKED = re.compile(r"(?<=content: )H4sI[\w+/=]+$", re.MULTILINE)


def read(text: str) -> dict[str, Any]:
    """Parse user-data as cloud-init does."""
    assert text.startswith("#cloud-config\n")
    parsed: dict[str, Any] = yaml.safe_load(text)
    return parsed


def written_files(text: str) -> dict[str, bytes]:
    """Return path and content of every file that the user-data writes."""
    return {
        entry["path"]: gzip.decompress(base64.b64decode(entry["content"]))
        if entry.get("encoding") == "gz+b64"
        else entry["content"].encode()
        for entry in read(text)["write_files"]
    }


def test_user_data_word_for_word() -> None:
    files = replace(FILES, lock=b"a==1  # train\n")
    text = render_user_data(replace(NODE, wheelhouse="/srv/wheels"), files)
    assert_golden("cloud-init.yaml", _PACKED.sub("(the file, gzipped, base64)", text))


def test_the_scripts_and_the_lock_arrive_as_they_are() -> None:
    there = written_files(render_user_data(NODE, FILES))
    for name in ("node-setup.sh", "install-payload.sh", "requirements.lock"):
        assert there[f"/usr/local/lib/tileforge/{name}"] == (BOOTSTRAP / name).read_bytes()


def test_the_same_values_give_the_same_text() -> None:
    assert render_user_data(NODE, FILES) == render_user_data(NODE, FILES)


def test_user_data_is_far_below_the_limit_of_metadata() -> None:
    assert len(render_user_data(NODE, FILES).encode()) < MAX_BYTES / 4


def test_user_data_over_the_limit_is_refused_with_its_size() -> None:
    many = replace(NODE, authorized_keys=(KEY,) * 3000)
    with pytest.raises(
        ConfigError, match=r"user-data has \d{6} bytes, more than the limit of 262144\."
    ):
        render_user_data(many, FILES)


def test_the_only_account_has_the_given_keys_and_no_password() -> None:
    (user,) = read(render_user_data(NODE, FILES))["users"]
    assert user["name"] == "trainer"
    assert user["ssh_authorized_keys"] == [f"{KEY} operator", f"{KEY} run"]
    assert user["lock_passwd"] is True
    assert "sudo" not in user


@pytest.mark.parametrize("comment", ["it's me", 'a "b": c', "x # y", "{{ 7 * 7 }}", "$(reboot)"])
def test_a_comment_in_a_key_stays_text(comment: str) -> None:
    node = replace(NODE, authorized_keys=(f"{KEY} {comment}",))
    (user,) = read(render_user_data(node, FILES))["users"]
    assert user["ssh_authorized_keys"] == [f"{KEY} {comment}"]


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("", "must start with a key type"),
        ("ssh-dss AAAA", "must start with a key type"),
        ('command="reboot" ' + KEY, "must start with a key type"),
        (f"{KEY} a\nssh-ed25519 AAAA", "must be one line"),
        ("ssh-ed25519 AAAA'", "is not base64"),
        ("ssh-ed25519", "is not a key of type ssh-ed25519"),
        ("ssh-rsa " + KEY.split()[1], "is not a key of type ssh-rsa"),
        ("-----BEGIN OPENSSH " + "PRIVATE KEY-----", r"'\.\.\.': is a private key"),
    ],
)
def test_what_is_no_public_key_is_refused(key: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        render_user_data(replace(NODE, authorized_keys=(KEY, key)), FILES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"authorized_keys": ()}, "no login would be possible"),
        ({"extra_packages": ("a b",)}, "extra_packages has 'a b'"),
        ({"extra_packages": ("-o=x",)}, "extra_packages has '-o=x'"),
        ({"extras": "train;reboot"}, "extras = 'train;reboot'"),
        ({"version": ""}, "version = ''"),
        ({"wheelhouse": "wheels"}, "wheelhouse = 'wheels'"),
        ({"wheelhouse": "/a b"}, "wheelhouse = '/a b'"),
        ({"torch_index": "https://me:secret@x.org/cpu"}, "torch_index = "),
    ],
)
def test_a_value_that_cannot_be_used_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        render_user_data(replace(NODE, **change), FILES)


@pytest.mark.processes
def test_a_setting_survives_the_shell() -> None:
    node = replace(NODE, torch_index="https://x.org/$(reboot);`id`&a")
    conf = written_files(render_user_data(node, FILES))["/etc/tileforge/bootstrap.conf"]
    done = subprocess.run(
        ["bash", "-c", '. /dev/stdin; printf %s "$TORCH_INDEX"'],
        input=conf,
        capture_output=True,
        check=True,
    )
    assert done.stdout.decode() == node.torch_index


def test_a_damaged_checkout_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cloud-init\.yaml\.j2: No such file"):
        BootstrapFiles.load(tmp_path)


def test_nothing_secret_is_in_user_data() -> None:
    text = render_user_data(NODE, FILES)
    parsed = read(text)
    assert not {"ssh_keys", "chpasswd", "password", "bootcmd"} & set(parsed)
    assert set(parsed["users"][0]) == {
        *("name", "gecos", "shell", "lock_passwd", "ssh_authorized_keys"),
    }
    everything = text + "".join(body.decode() for body in written_files(text).values())
    secret = re.compile(
        r"PRIVATE KEY|AKIA[0-9A-Z]{16}|AIza[\w-]{35}|gh[ps]_\w{36}|ya29\.|//\S+:\S+@"
    )
    assert secret.findall(everything) == []


def test_the_machines_of_the_tests_boot_from_the_default_stacks_text(tmp_path: Path) -> None:
    (stacks,) = {
        instance["metadata"]["user-data"]
        for instance in deploy({}, folder=tmp_path).of_type("Instance")
    }
    assert node_user_data(STACK_KEY) == stacks


def test_with_os_login_one_user_may_log_in_and_no_key_is_written() -> None:
    node = replace(NODE, authorized_keys=(), os_login_user="ada_example_com")
    text = render_user_data(node, FILES)
    (user,) = read(text)["users"]
    assert "ssh_authorized_keys" not in user
    sshd = written_files(text)["/etc/ssh/sshd_config.d/10-tileforge.conf"].decode()
    assert "AllowUsers ada_example_com\n" in sshd
    with pytest.raises(ConfigError, match="os_login_user = 'a b'"):
        render_user_data(replace(node, os_login_user="a b"), FILES)
