"""The cluster's settings: schema and code agree, and all problems are reported together."""

from __future__ import annotations

import contextvars
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

from infra.config import KEYS, ClusterConfig
from infra.config_reading import load_config, read_config
from payload.core.errors import ConfigError
from payload.machines.machine_types import machine_type, machine_types
from payload.stack.cloud_requirements import CloudRequirements, requirements_of
from payload.stack.operator_key_file import make_key
from tests.infra.stacks import KEY, ROOT, as_pulumi_hands_over

PULUMI: dict[str, Any] = yaml.safe_load((ROOT / "Pulumi.yaml").read_text(encoding="utf-8"))
TYPES = {str: "string", int: "integer", bool: "boolean", tuple: "array"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a project folder with the operator's key of the cluster `dev`."""
    key = tmp_path / ".cluster/dev/id_ed25519.pub"
    key.parent.mkdir(parents=True)
    key.write_text(f"{KEY}\n", encoding="utf-8")
    return tmp_path


def read(root: Path, **settings: Any) -> ClusterConfig:
    values = as_pulumi_hands_over({"project": "my-project"} | settings)
    plain = {key.partition(":")[2]: value for key, value in values.items()}
    return read_config(plain, stack="dev", root=root)[0]


@pytest.mark.parametrize("name", ["id_ed25519", "id_ed25519.pub", ""])
def test_the_key_pair_is_not_made_through_a_link(name: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    link = tmp_path / "cloned" / ".cluster" / "dev" / name
    link.parent.mkdir(parents=True, exist_ok=True)
    if not name:
        outside.mkdir()
    link.symlink_to(outside)
    with pytest.raises(ConfigError, match=f"{link} is a symlink"):
        read_config(
            {"project": "my-project"}, stack="dev", root=tmp_path / "cloned", missing_key=make_key
        )
    assert not outside.exists() or not list(outside.iterdir())


def test_the_schema_and_the_code_have_the_same_settings_types_and_defaults() -> None:
    for key, field in KEYS.items():
        default = field.default
        declared = PULUMI["config"][key]
        assert declared["type"] == TYPES[type(default)], key
        assert declared["default"] == (list(default) if isinstance(default, tuple) else default)
    assert set(PULUMI["config"]) == set(KEYS)


def test_the_schema_keeps_to_what_pulumi_allows() -> None:
    for key, declared in PULUMI["config"].items():
        assert set(declared) <= {"type", "items", "default", "description"}, key
        assert declared["type"] in {"string", "integer", "boolean", "array"}
        assert len(declared["description"]) > 10
    assert PULUMI["options"] == {"refresh": "always"}
    assert PULUMI["runtime"]["options"] == {"toolchain": "pip", "virtualenv": ".venv"}


def test_the_defaults_as_pulumi_hands_them_over_are_the_codes(root: Path) -> None:
    defaults = {key: declared["default"] for key, declared in PULUMI["config"].items()}
    config = read(root, **(defaults | {"project": "my-project"}))
    assert config == ClusterConfig(cluster="dev", project="my-project")


def test_a_stack_without_settings_needs_what_its_defaults_are() -> None:
    config, need = ClusterConfig(), requirements_of({})
    assert need == CloudRequirements()
    assert (need.machine_type, need.region, need.image) == (
        *(config.machine_type, config.region),
        config.image,
    )
    assert need.disk_gib == sum(config.boot_disk_gb(index=i) for i in range(need.node_count))
    assert need.disk_type == config.boot_disk_type()


def test_a_mistyped_setting_is_asked_about(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"nodecount: unknown setting.*Did you mean nodeCount\?"):
        read(root, nodecount=3)


def test_the_default_disks_fit_a_new_projects_quota() -> None:
    config = ClusterConfig()
    sizes = [config.boot_disk_gb(index=index) for index in range(config.node_count)]
    assert sum(sizes) <= 500


# Settings, and the expected message: key, value and fix.
BAD: list[tuple[dict[str, Any], str]] = [
    ({"project": ""}, r"project = '' is not a Google Cloud project id.*pulumi config set project"),
    ({"cluster": "Dev"}, r"cluster = 'Dev'.*up to 24 lower-case letters"),
    ({"cluster": "a" * 25}, r"cluster = 'a{25}'.*up to 24"),
    ({"region": "Iowa"}, r"region = 'Iowa' is not a region"),
    ({"region": "us-east4"}, r"zones has 'us-central1-a', which is not in region us-east4.*--path"),
    ({"zones": []}, r"zones is empty"),
    ({"zones": "us-central1-a"}, r"zones = 'us-central1-a': must be a list of strings"),
    ({"nodeCount": 0}, r"nodeCount = 0: must be from 1 to 64"),
    ({"nodeCount": "three"}, r"nodeCount = 'three': must be an integer"),
    ({"machineType": "c3d-standard-8"}, r"c3d runs on AMD EPYC Genoa, which has no AMX"),
    ({"machineType": "c4d-highmem-8"}, r"c4d runs on AMD EPYC Turin, which has no AMX"),
    ({"machineType": "h4d-standard-192"}, r"h4d runs on AMD EPYC Turin, which has no AMX"),
    ({"machineType": "n2-standard-8"}, r"n2 runs on Intel Cascade Lake or Ice Lake, which has no"),
    ({"machineType": "c4a-standard-8"}, r"c4a runs on Google Axion \(Arm\)"),
    (
        {"machineType": "c3-standard-6"},
        r"not a machine type of family c3.*c3-\{standard,highmem,highcpu\}-\{4,8,22,44",
    ),
    ({"machineType": "big"}, r"unknown family 'big'"),
    ({"accessMode": "open"}, r"accessMode = 'open'\. Use one of: iap, direct, oslogin"),
    ({"accessMode": "direct"}, r"operatorCidr = ''.*Use your own address"),
    (
        {"accessMode": "direct", "operatorCidr": "0.0.0.0/0"},
        r"'0\.0\.0\.0/0': this range is the whole internet",
    ),
    ({"accessMode": "direct", "operatorCidr": "::/0"}, r"'::/0': this range is the whole internet"),
    ({"accessMode": "direct", "operatorCidr": "2001:db8::1/128"}, r"must be an IPv4 address range"),
    ({"accessMode": "direct", "operatorCidr": "10.0.0.0/8"}, r"has more than 256 addresses"),
    ({"accessMode": "direct", "operatorCidr": "10.0.0.1/24"}, r"has host bits set"),
    (
        {"operatorCidr": "198.51.100.7/32"},
        r"operatorCidr.*used only with accessMode direct.*config rm",
    ),
    ({"accessMode": "oslogin"}, r"osLoginUser = ''.*describe-profile"),
    ({"osLoginUser": "ada"}, r"osLoginUser = 'ada': used only with accessMode oslogin"),
    ({"spot": "maybe"}, r"spot = 'maybe'\. Use one of: false, true, auto"),
    ({"maxLifetime": "0h"}, r"maxLifetime = '0h': must be from 10m to 30d"),
    ({"maxLifetime": "never"}, r"maxLifetime = 'never'.*This limit is required"),
    ({"maxLifetime": "31d"}, r"maxLifetime = '31d'"),
    ({"maxHourlyUsd": "cheap"}, r"maxHourlyUsd = 'cheap': must be dollars an hour"),
    ({"maxHourlyUsd": "0"}, r"maxHourlyUsd = '0'"),
    ({"diskType": "pd-standard"}, r"'pd-standard', which c3-highmem-8 cannot boot from.*pd-ssd"),
    (
        {"diskType": "pd-balanced", "machineType": "c4-standard-8"},
        r"Use auto or.*hyperdisk-balanced",
    ),
    ({"diskGb": 10}, r"diskGb = 10: must be from 30"),
    ({"headDiskGb": 50}, r"headDiskGb = 50: must be 0 .use the value of diskGb"),
    ({"bucket": "gs://mine"}, r"bucket = 'gs://mine'\. Use none, create, or the name"),
    ({"kmsKey": "my-key"}, r"kmsKey = 'my-key': must be projects/P/locations"),
    (
        {"kmsKey": "projects/p/locations/europe-west4/keyRings/r/cryptoKeys/k"},
        r"location is europe-west4, but the cluster's region is us-central1\. Use a key of that",
    ),
    ({"kmsKey": "projects/p/locations/eur4/keyRings/r/cryptoKeys/k"}, r"location is eur4, but the"),
    (
        {"kmsKey": "projects/p/locations/global/keyRings/r/cryptoKeys/k", "bucket": "create"},
        r"its location is global, but the cluster's region is us-central1",
    ),
    ({"threadsPerCore": 3}, r"threadsPerCore = 3\. Use one of: 1, 2"),
    (
        {"threadsPerCore": 2, "machineType": "h3-standard-88"},
        r"h3-standard-88 has one thread per core",
    ),
    ({"mtu": 9000}, r"mtu = 9000: must be from 1300 to 8896"),
    ({"compactPlacement": "yes"}, r"compactPlacement = 'yes'\. Use one of: auto, true, false"),
    (
        {"compactPlacement": "true", "machineType": "n4-standard-16"},
        r"compactPlacement = 'true'.*N4 machines have no compact.*set compactPlacement auto",
    ),
    (
        {"compactPlacement": True, "machineType": "c4-standard-8"},
        r"C4 machines have no compact placement",
    ),
    ({"tier1": True}, r"tier1 = true, but c3-highmem-8 has 8 vCPUs: C3 needs at least 44"),
    ({"tier1": True, "machineType": "c3-standard-22"}, r"c3-standard-22 has 22 vCPUs"),
    ({"image": "projects/x/global/images/family/y"}, r"is a family, whose image can change"),
    (
        {"image": "ubuntu-2404"},
        r"image = 'ubuntu-2404': must be projects/PROJECT/global/images/NAME",
    ),
    (
        {"image": "projects/debian-cloud/global/images/debian-12-bookworm-v20260901"},
        r"Google's Debian images lack cloud-init.*Use an image of ubuntu-os-cloud",
    ),
    (
        {"image": "projects/rocky-linux-cloud/global/images/rocky-linux-9-v20260901"},
        r"its images lack apt.*your own image with cloud-init and apt",
    ),
    ({"confidential": True}, r"only c3-standard machines have TDX, not c3-highmem-8"),
    ({"egress": "none"}, r"wheelhouse is empty, but with egress none.*package index"),
    (
        {
            "egress": "none",
            "wheelhouse": "/srv/wheels",
            "accessMode": "direct",
            "operatorCidr": "198.51.100.7/32",
        },
        r"egress = 'none' with accessMode direct, which gives the head an external address",
    ),
    ({"egress": "some"}, r"egress = 'some'\. Use one of: nat, none"),
    ({"wheelhouse": "wheels"}, r"wheelhouse = 'wheels': must be an absolute path"),
    ({"labels": ["Owner=Ada"]}, r"labels has 'Owner=Ada': must be key=value of lower-case"),
    ({"labels": ["tileforge-cluster=x"]}, r"Keys must not begin with tileforge or goog"),
    ({"nodecount": 3}, r"nodecount: unknown setting; remove it\. Known: accessMode, bucket"),
    ({"operatorPublicKeyFile": "none.pub"}, r"none\.pub: No such file.*Create a key pair: mkdir"),
]


@pytest.mark.parametrize(("settings", "message"), BAD, ids=[str(settings) for settings, _ in BAD])
def test_a_setting_that_cannot_be_used_is_refused(
    root: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"1 problem.*\n.*tileforge:.*{message}"):
        read(root, **settings)


def test_everything_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    wrong = {
        "project": "",
        "nodeCount": "many",
        "machineType": "c3d-standard-8",
        "maxLifetime": "",
        "egress": "none",
        "mtu": 1,
        "typo": "x",
    }
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, **wrong)
    lines = str(caught.value).splitlines()
    named = [line.strip().partition(" ")[0].strip(":") for line in lines[1:]]
    assert sorted(named) == [
        "tileforge:egress" if key == "egress" else f"tileforge:{key}"
        for key in sorted([*(set(wrong) - {"egress"}), "operatorPublicKeyFile", "wheelhouse"])
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("hello", "must start with a key type"),
        ("-----BEGIN OPENSSH " + "PRIVATE KEY-----", "is a private key"),
    ],
)
def test_a_key_file_without_a_public_key_is_refused(root: Path, text: str, message: str) -> None:
    (root / ".cluster/dev/id_ed25519.pub").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message) as caught:
        read(root)
    assert "BEGIN" not in str(caught.value)


@pytest.mark.parametrize("place", [".cluster", ".cluster/dev", ".cluster/dev/id_ed25519"])
def test_the_operators_key_is_not_taken_through_a_link(root: Path, place: str) -> None:
    """Attack: a link in a cloned project makes the program use or write a key of ~/.ssh."""
    if (root / place).exists():
        (root / place).rename(root / "elsewhere")
    (root / place).symlink_to(root / "elsewhere")
    with pytest.raises(ConfigError, match=f"{place} is a symlink"):
        read(root)


GOOD: Mapping[str, dict[str, Any]] = {
    "C4": {"machineType": "c4-highmem-48", "tier1": True},
    "N4": {"machineType": "n4-standard-16"},
    "H3": {"machineType": "h3-standard-88", "spot": "true"},
    "TDX": {"machineType": "c3-standard-8", "confidential": True},
    "compact C3": {"compactPlacement": "true"},
    "C4 apart": {"machineType": "c4-standard-8", "compactPlacement": "false"},
    "own image": {"image": "projects/x/global/images/mine"},
    "Tier_1": {"machineType": "c3-standard-44", "tier1": True},
    "labels": {"labels": ["owner=ada", "cost-centre=7"]},
    "no cap": {"maxHourlyUsd": "none"},
}


@pytest.mark.parametrize("settings", GOOD.values(), ids=GOOD)
def test_what_can_be_had_is_accepted(root: Path, settings: dict[str, Any]) -> None:
    assert read(root, **settings)


PROVIDERS = {"gcp:project": "acme-lab", "gcp:region": "europe-west4"}


def load(values: dict[str, str], root: Path) -> ClusterConfig:
    """Return the settings of a stack's complete config, as the engine passes it to the program."""
    environment = {"PULUMI_CONFIG": json.dumps(values)}
    with (
        mock.patch.dict("os.environ", environment),
        mock.patch("pulumi.get_stack", lambda: "dev"),
    ):
        return contextvars.Context().run(load_config, root)[0]


@pytest.mark.parametrize(
    ("own", "project", "region"),
    [
        ({}, "acme-lab", "europe-west4"),
        # The format in which Pulumi passes the defaults of Pulumi.yaml.
        ({"tileforge:project": "", "tileforge:region": "us-central1"}, "acme-lab", "europe-west4"),
        (
            {"tileforge:project": "my-project", "tileforge:region": "us-east5"},
            "my-project",
            "us-east5",
        ),
    ],
)
def test_project_and_region_of_the_provider_count_where_the_programs_are_not_set(
    root: Path, own: dict[str, str], project: str, region: str
) -> None:
    zones = {"tileforge:zones": json.dumps([f"{region}-b"])}
    config = load({**PROVIDERS, **own, **zones}, root)
    assert (config.project, config.region) == (project, region)


@pytest.mark.parametrize(
    ("key", "variable"),
    [
        ("gcp:credentials", "GOOGLE_CREDENTIALS"),
        ("gcp:accessToken", "GOOGLE_OAUTH_ACCESS_TOKEN"),
        ("gcp:impersonateServiceAccount", "GOOGLE_IMPERSONATE_SERVICE_ACCOUNT"),
    ],
)
def test_a_login_in_the_stacks_settings_is_refused_with_its_variable(
    root: Path, key: str, variable: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load({**PROVIDERS, key: "ya29.secret"}, root)
    assert f"pulumi config rm {key}; and set {variable} in the environment" in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("machine", machine_types(), ids=lambda machine: str(machine.name))
def test_a_machine_has_whole_cores_in_each_domain(machine: Any) -> None:
    assert machine_type(machine.name) == machine
    assert machine.physical_cores % machine.numa_domains == 0


def test_values_as_json_survive() -> None:
    assert as_pulumi_hands_over({"zones": ["a"], "tier1": True, "nodeCount": 3}) == {
        "tileforge:zones": json.dumps(["a"]),
        "tileforge:tier1": "true",
        "tileforge:nodeCount": "3",
    }
