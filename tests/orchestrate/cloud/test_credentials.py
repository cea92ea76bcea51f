"""Credentials of requests: the provider's variables, and errors of each."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from payload.config.store_address import parse_store_address
from payload.core.errors import CloudAuthError, ConfigError, ExitCode
from payload.orchestrate.__main__ import main
from payload.orchestrate.clouds.gcp.client import Google
from payload.orchestrate.clouds.gcp.endpoints import Endpoints
from payload.orchestrate.clouds.pulumi.cli_errors import refusal
from payload.orchestrate.clouds.pulumi.failures import explain
from payload.orchestrate.ssh.remote_calls import ProxyProcess
from payload.storage.bucket import BucketStore
from payload.storage.google_environment_login import GoogleLogin
from payload.storage.objects import StoreRefusedError
from tests.orchestrate.cloud.conftest import Site
from tests.orchestrate.cloud.fake_pulumi import step
from tests.orchestrate.cloud.stacks import Capture, own_key, words
from tests.orchestrate.cloud.standin import PROJECT, Fault
from tests.orchestrate.cloud.test_failures import failed

EMAIL = "robot@acme-lab.iam.gserviceaccount.com"
ADDRESS = parse_store_address("gs://acme-results/runs")
TARGET = "builder@acme-lab.iam.gserviceaccount.com"


def key() -> str:
    """Return a service account's key in Google's format, without any access."""
    private = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = private.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return json.dumps(
        {
            "type": "service_account",
            "project_id": PROJECT,
            "private_key_id": "1",
            "private_key": pem.decode(),
            "client_email": EMAIL,
            "client_id": "1",
            "token_uri": "https://oauth2.googleapis.com/token",
        }
    )


def google(env: Mapping[str, str]) -> Google:
    """Return the client of an environment, without sending a request."""
    return Google(PROJECT, endpoints=Endpoints.from_env(env))


@pytest.mark.slow
@pytest.mark.parametrize(
    "variable",
    [
        "GOOGLE_CREDENTIALS",
        "GOOGLE_CLOUD_KEYFILE_JSON",
        "GCLOUD_KEYFILE_JSON",
        "GOOGLE_APPLICATION_CREDENTIALS",
    ],
)
def test_a_key_is_read_from_every_variable_of_the_provider(variable: str, tmp_path: Path) -> None:
    path = tmp_path / "key.json"
    path.write_text(key())
    assert google({variable: str(path)}).check_credentials() == f"{EMAIL} ({variable})"
    if variable != "GOOGLE_APPLICATION_CREDENTIALS":
        assert google({variable: key()}).check_credentials() == f"{EMAIL} ({variable})"


def test_a_token_goes_before_a_key_and_both_can_act_as_another(tmp_path: Path) -> None:
    env = {"GOOGLE_OAUTH_ACCESS_TOKEN": "ya29.secret", "GOOGLE_CREDENTIALS": key()}
    found = google(env)
    assert found.check_credentials() == "GOOGLE_OAUTH_ACCESS_TOKEN"
    assert not found.lacks_quota_project()
    env["GOOGLE_IMPERSONATE_SERVICE_ACCOUNT"] = TARGET
    shown = google(env).check_credentials()
    assert shown == f"{TARGET} (GOOGLE_OAUTH_ACCESS_TOKEN, as {TARGET})"
    assert "secret" not in repr(Endpoints.from_env(env))


@pytest.mark.parametrize("quota_project", [None, "acme-lab"])
def test_a_persons_login_has_a_quota_project_or_not(
    quota_project: str | None, tmp_path: Path
) -> None:
    login = {"client_id": "1", "client_secret": "2", "refresh_token": "3"}
    login |= {"type": "authorized_user"}
    login |= {"quota_project_id": quota_project} if quota_project else {}
    path = tmp_path / "adc.json"
    path.write_text(json.dumps(login))
    found = google({"GOOGLE_APPLICATION_CREDENTIALS": str(path)})
    assert found.lacks_quota_project() == (quota_project is None)


@pytest.mark.parametrize(
    ("variable", "value", "words_of_it"),
    [
        ("GOOGLE_APPLICATION_CREDENTIALS", "/nowhere/key.json", "the file does not exist"),
        ("GOOGLE_CREDENTIALS", "~/nowhere/key.json", "the file does not exist"),
        ("GOOGLE_CREDENTIALS", "{", "GOOGLE_CREDENTIALS"),
        ("GOOGLE_CREDENTIALS", "{}", "no usable Google Cloud credentials in GOOGLE_CREDENTIALS"),
        (
            "GOOGLE_CREDENTIALS",
            '{"type": "service_account"}',
            "no usable Google Cloud credentials in",
        ),
    ],
)
def test_credentials_that_cannot_be_read_are_refused_with_their_variable(
    variable: str, value: str, words_of_it: str
) -> None:
    with pytest.raises(CloudAuthError) as caught:
        google({variable: value}).check_credentials()
    assert words_of_it in str(caught.value) and variable in str(caught.value)


EXPIRED = "Request had invalid authentication credentials."
JWT = '{"error":"invalid_grant","error_description":"Invalid JWT%s"}'
ACTS = {"GOOGLE_IMPERSONATE_SERVICE_ACCOUNT": TARGET}
LOG_IN = "Log in: gcloud auth application-default login"
KINDS = [
    ({}, EXPIRED, "(application default): the login has expired or was revoked", LOG_IN),
    (
        {"GOOGLE_OAUTH_ACCESS_TOKEN": "x"},
        EXPIRED,
        "(GOOGLE_OAUTH_ACCESS_TOKEN): access tokens are valid for one hour",
        "export GOOGLE_OAUTH_ACCESS_TOKEN=$(gcloud auth print-access-token)",
    ),
    (
        {"GOOGLE_CREDENTIALS": "{}"},
        JWT % " Signature.",
        "(GOOGLE_CREDENTIALS): the key was deleted or replaced, or its account was disabled",
        f"unset GOOGLE_CREDENTIALS. {LOG_IN}",
    ),
    (
        {"GOOGLE_APPLICATION_CREDENTIALS": "/k.json"},
        JWT % ": Token must be a short-lived token (60 minutes) and in a reasonable timeframe.",
        "(GOOGLE_APPLICATION_CREDENTIALS): this machine's clock is wrong",
        "Set the clock, then repeat the command",
    ),
    # The refused login is the one that impersonates the account, so no role helps.
    (ACTS, EXPIRED, f"(application default, as {TARGET}): the login has expired", LOG_IN),
    (
        ACTS,
        "impersonate: status code 403: Permission 'iam.serviceAccounts.getAccessToken' denied",
        f"'{TARGET}': the account does not exist, or this login cannot impersonate it",
        "roles/iam.serviceAccountTokenCreator on the account",
    ),
]


@pytest.mark.parametrize(("env", "said", "cause", "fix"), KINDS)
def test_credentials_that_are_refused_have_the_cause_and_fix_of_their_kind(
    site: Site, env: dict[str, str], said: str, cause: str, fix: str
) -> None:
    """The same error from our request, from Pulumi's engine, and from its state in a bucket."""
    site.env |= env
    client = site.google()
    # Imported after the client, which suppresses their warnings about Python's version.
    from google.api_core.exceptions import Unauthorized
    from google.auth.exceptions import RefreshError

    def refused() -> None:
        raise Unauthorized(said) if said == EXPIRED else RefreshError(said)

    with pytest.raises(CloudAuthError) as caught:
        client.call("project", refused)
    login = GoogleLogin.from_env(env)
    engine = explain(replace(failed(f"googleapi: Error 401: {said}"), login=login))
    read = f"error: read https://storage.googleapis.com: 401 Unauthorized {said}"
    bucket = refusal("pulumi stack output", read, login)
    for error in (caught.value, engine, bucket):
        assert error.exit_code == ExitCode.AUTH
        assert cause in str(error) and fix in str(error), str(error)
        assert ("roles" in str(error)) is ("getAccessToken" in said)


_KEY_FILE, _ACCOUNT, _TOKEN = (
    "CLOUDSDK_AUTH_CREDENTIAL_FILE_OVERRIDE",
    "CLOUDSDK_AUTH_IMPERSONATE_SERVICE_ACCOUNT",
    "CLOUDSDK_AUTH_ACCESS_TOKEN",
)


@pytest.mark.parametrize(
    ("env", "gcloud"),
    [
        ({}, {}),
        ({"GOOGLE_OAUTH_ACCESS_TOKEN": "x", "GOOGLE_CREDENTIALS": "/k.json"}, {_TOKEN: "x"}),
        (
            {"GOOGLE_CREDENTIALS": "/k.json", "GOOGLE_IMPERSONATE_SERVICE_ACCOUNT": TARGET},
            {_KEY_FILE: "/k.json", _ACCOUNT: TARGET},
        ),
        (
            {"GOOGLE_OAUTH_ACCESS_TOKEN": "x", "GOOGLE_IMPERSONATE_SERVICE_ACCOUNT": TARGET},
            {_TOKEN: "x", _ACCOUNT: TARGET},
        ),
        ({"GOOGLE_CREDENTIALS": "/k.json", _KEY_FILE: "/other.json"}, {_KEY_FILE: "/other.json"}),
    ],
)
@pytest.mark.processes
def test_the_way_to_the_head_has_the_same_login(
    env: dict[str, str], gcloud: dict[str, str], tmp_path: Path
) -> None:
    found, _ = what_gcloud_gets(env, tmp_path)
    assert {k: v for k, v in found.items() if k.startswith("CLOUDSDK_")} == gcloud


@pytest.mark.processes
def test_a_key_as_text_reaches_gcloud_in_a_file_of_its_own_that_goes_with_it(
    tmp_path: Path,
) -> None:
    found, content = what_gcloud_gets({"GOOGLE_CREDENTIALS": '{"type": "x"}'}, tmp_path)
    assert content == ['{"type": "x"}', 0o600]
    assert not Path(found[_KEY_FILE]).exists()


def what_gcloud_gets(env: dict[str, str], folder: Path) -> tuple[dict[str, str], list[Any]]:
    """Return the proxy command's environment, and the key file's text and mode, if any."""
    printed = folder / "env.json"
    code = (
        "import json, os, stat; e = dict(os.environ); f = e.get('CLOUDSDK_AUTH_CREDENTIAL_FILE"
        "_OVERRIDE', ''); k = [open(f).read(), stat.S_IMODE(os.stat(f).st_mode)] if "
        f"os.path.exists(f) else []; json.dump([e, k], open({str(printed)!r}, 'w'))"
    )
    process = ProxyProcess([sys.executable, "-c", code], node="head", env=env)
    assert process.socket.recv(1) == b""  # the proxy has ended
    process.close()
    found: tuple[dict[str, str], list[Any]] = json.loads(printed.read_text())
    return found


@pytest.mark.parametrize(
    "env",
    [
        {"GOOGLE_OAUTH_ACCESS_TOKEN": "ya29.secret"},
        {"GOOGLE_CREDENTIALS": "KEY"},
        {"GOOGLE_OAUTH_ACCESS_TOKEN": "x", "GOOGLE_IMPERSONATE_SERVICE_ACCOUNT": TARGET},
    ],
)
def test_a_store_has_the_login_of_the_commands(
    env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, key() if value == "KEY" else value)
    store = BucketStore(ADDRESS, timeout_s=1.0, retry_s=1.0)
    found = store._client()._credentials
    if "GOOGLE_IMPERSONATE_SERVICE_ACCOUNT" in env:
        assert found.service_account_email == TARGET
    elif "GOOGLE_CREDENTIALS" in env:
        assert found.service_account_email == EMAIL
    else:
        assert found.token == env["GOOGLE_OAUTH_ACCESS_TOKEN"]
    # A server other than Google's receives no credentials.
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")
    local = BucketStore(ADDRESS, timeout_s=1.0, retry_s=1.0)
    assert type(local._client()._credentials).__name__ == "AnonymousCredentials"


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"GOOGLE_CREDENTIALS": "/nowhere/key.json"}, "the file does not exist"),
        ({"GOOGLE_OAUTH_ACCESS_TOKEN": "x"}, "export GOOGLE_OAUTH_ACCESS_TOKEN="),
        ({"GOOGLE_CREDENTIALS": "KEY"}, "Set GOOGLE_CREDENTIALS to a valid key"),
    ],
)
def test_a_store_says_how_to_renew_the_login_that_is_refused(
    env: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, key() if value == "KEY" else value)
    with pytest.raises(StoreRefusedError, match=re.escape(said)):
        refuse(BucketStore(ADDRESS, timeout_s=1.0, retry_s=1.0), is_key="GOOGLE_CREDENTIALS" in env)


def refuse(store: BucketStore, *, is_key: bool) -> None:
    """Make Google refuse the store client's requests."""
    # The libraries are already imported, so they print no warning about Python's version.
    from google.api_core.exceptions import Unauthorized
    from google.auth.exceptions import RefreshError

    with store._plainly("listing it"):
        if is_key:
            raise RefreshError("invalid_grant: Invalid JWT Signature")
        raise Unauthorized("Invalid Credentials")


def test_a_project_that_is_mistyped_is_refused_with_where_to_look(site: Site) -> None:
    message = f"The resource 'projects/{PROJECT}' was not found"
    site.cloud.faults.append(Fault(path=f"projects/{PROJECT}$", status=404, message=message))
    with pytest.raises(
        ConfigError, match="List your projects: gcloud projects list; then: pulumi config"
    ):
        site.google().check_access()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ({"status": 401, "message": "Invalid Credentials"}, ExitCode.AUTH),
        ({"status": 403, "message": "The caller does not have permission"}, ExitCode.AUTH),
        ({"status": 404, "message": "The resource was not found"}, ExitCode.CONFIG),
    ],
)
def test_up_builds_nothing_with_credentials_that_work_for_pulumi_alone(
    site: Site, capsys: Capture, fault: dict[str, Any], code: ExitCode
) -> None:
    own_key(site)
    site.configure(cluster="mine", project=PROJECT, zones=["us-central1-a"])
    network = "urn:pulumi:dev::tileforge::gcp:compute/network:Network::mine-network"
    site.pulumi.on("preview", events=step("create", network))
    site.pulumi.on("up", out="done\n")
    site.cloud.faults.append(
        Fault(path=f"projects/{PROJECT}$", reason="forbidden", times=9, **fault)
    )
    assert main(["up", "--yes"], site.env) == code
    assert not [each for each in words(site) if each.startswith("up ")]
