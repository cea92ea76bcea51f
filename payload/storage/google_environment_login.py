"""CONTRACT: the Google login that the environment configures, for Google's clients and gcloud.

The order is the same as in Google's Pulumi provider: an access token, a key or its file, then
application default credentials. Each can impersonate a service account. Source:
google/transport/config.go of terraform-provider-google.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from payload.core.errors import CloudAuthError

TOKEN = "GOOGLE_OAUTH_ACCESS_TOKEN"
_KEYS = ("GOOGLE_CREDENTIALS", "GOOGLE_CLOUD_KEYFILE_JSON", "GCLOUD_KEYFILE_JSON")
_FILE = "GOOGLE_APPLICATION_CREDENTIALS"
_IMPERSONATED = "GOOGLE_IMPERSONATE_SERVICE_ACCOUNT"
_LOG_IN = "Log in: gcloud auth application-default login"
# Error texts of Google's token server, of its APIs and of the clients in Go and Python:
# https://github.com/pulumi/pulumi-gcp/issues/479
REFUSED_CREDENTIALS = re.compile(
    r"invalid_grant|invalid_client|unauthorized_client|(?i:\breauth)|\bError 401\b"
    r"|\b401 Unauthorized|(?:status|response) code:? 401|iam\.serviceAccounts\.getAccessToken"
    r"|(?i:invalid authentication credentials|invalid credentials)|\bUNAUTHENTICATED\b"
)
"""Matches messages about invalid credentials, as opposed to missing roles."""
_MAY_NOT_ACT = re.compile(r"getAccessToken|PERMISSION_DENIED|\b40[34]\b|NOT_FOUND|[Nn]ot found")
_WRONG_CLOCK = re.compile(r"short-lived token|reasonable timeframe|Token used too early")


@dataclass(frozen=True, slots=True, kw_only=True)
class GoogleLogin:
    """The credentials of requests to Google."""

    variable: str = ""
    """Variable with the credentials or their file; empty for application default credentials."""
    value: str = field(default="", repr=False)
    impersonated: str = ""
    """Service account to impersonate; empty for no impersonation."""

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> GoogleLogin:
        """Return the login that these variables configure."""
        variable = next((name for name in (TOKEN, *_KEYS, _FILE) if env.get(name)), "")
        return cls(
            variable=variable,
            value=env.get(variable, "").strip(),
            impersonated=env.get(_IMPERSONATED, "").strip(),
        )

    @property
    def is_default(self) -> bool:
        """Return True for application default credentials without impersonation."""
        return not self.variable and not self.impersonated

    def source(self) -> str | Path:
        """Return the token, the JSON of a key, or the path of its file.

        Raises CloudAuthError for a missing file.
        """
        if self.variable == TOKEN or self.key_text:
            return self.value
        path = Path(self.value).expanduser()
        if not path.is_file():
            raise CloudAuthError(
                f"{self.variable} = {str(path)!r}: the file does not exist. Set the variable to "
                f"a key file, or remove it: unset {self.variable}. {_LOG_IN}"
            )
        return path

    @property
    def key_text(self) -> str:
        """Return the JSON of a key if the variable contains it, otherwise an empty text."""
        return self.value if self.variable != TOKEN and self.value.startswith("{") else ""

    def for_gcloud(self, *, key_file: str) -> dict[str, str]:
        """Return the variables that configure gcloud with the same login.

        `key_file` is a file with `key_text`, as gcloud reads keys only from files.
        https://cloud.google.com/sdk/docs/authorizing, https://cloud.google.com/sdk/docs/properties
        """
        found = {"CLOUDSDK_AUTH_IMPERSONATE_SERVICE_ACCOUNT": self.impersonated}
        if self.variable == TOKEN:
            found["CLOUDSDK_AUTH_ACCESS_TOKEN"] = self.value
        elif self.variable:
            file = key_file if self.key_text else str(Path(self.value).expanduser())
            found["CLOUDSDK_AUTH_CREDENTIAL_FILE_OVERRIDE"] = file
        return {name: value for name, value in found.items() if value}

    def renewal(self) -> str:
        """Return a sentence on how to get valid credentials."""
        if self.variable == TOKEN:
            return f"Create a new token: export {TOKEN}=$(gcloud auth print-access-token)"
        if self.variable:
            return (
                f"Set {self.variable} to a valid key, or remove it: unset {self.variable}. "
                f"{_LOG_IN}"
            )
        return _LOG_IN

    def refusal(self, message: str) -> str:
        """Return cause and fix for credentials that Google rejected with `message`.

        The only missing role that can be the cause is the role to impersonate a service account.
        """
        if self.impersonated and _MAY_NOT_ACT.search(message):
            return (
                f"{_IMPERSONATED} = {self.impersonated!r}: the account does not exist, or this "
                "login cannot impersonate it. Grant this login "
                "roles/iam.serviceAccountTokenCreator on the account, and enable the API "
                "iamcredentials.googleapis.com in the account's project"
            )
        prefix = f"Google rejected the credentials ({self.describe()}): "
        if _WRONG_CLOCK.search(message):
            return f"{prefix}this machine's clock is wrong. Set the clock, then repeat the command"
        if self.variable == TOKEN:
            cause = (
                "access tokens are valid for one hour, and this one has expired or is not a token"
            )
        elif self.variable:
            cause = "the key was deleted or replaced, or its account was disabled or deleted"
        else:
            cause = "the login has expired or was revoked"
        return f"{prefix}{cause}. {self.renewal()}"

    def describe(self) -> str:
        """Return a description of the source of the credentials."""
        whose = self.variable or "application default"
        return f"{whose}, as {self.impersonated}" if self.impersonated else whose
