"""CONTRACT: reads the Google login from the environment, for Google's clients and gcloud. Pure.

It is read as Google's Pulumi provider reads it, in its order: an access token, a key or its
file, then application default credentials; and as whom they act (google/transport/config.go of
terraform-provider-google).
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
# As Google's token server, its APIs and the clients in Go and Python write it:
# https://github.com/pulumi/pulumi-gcp/issues/479
REFUSED_CREDENTIALS = re.compile(
    r"invalid_grant|invalid_client|unauthorized_client|(?i:\breauth)|\bError 401\b"
    r"|\b401 Unauthorized|(?:status|response) code:? 401|iam\.serviceAccounts\.getAccessToken"
    r"|(?i:invalid authentication credentials|invalid credentials)|\bUNAUTHENTICATED\b"
)
"""Matches the text of a refusal of credentials, whatever their roles."""
_MAY_NOT_ACT = re.compile(r"getAccessToken|PERMISSION_DENIED|\b40[34]\b|NOT_FOUND|[Nn]ot found")
_WRONG_CLOCK = re.compile(r"short-lived token|reasonable timeframe|Token used too early")


@dataclass(frozen=True, slots=True, kw_only=True)
class GoogleLogin:
    """Whose credentials requests have."""

    variable: str = ""
    """The variable that holds or names them; empty: application default credentials."""
    value: str = field(default="", repr=False)
    impersonated: str = ""
    """The service account that they act as; empty: as themselves."""

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> GoogleLogin:
        """Return the login of these variables."""
        variable = next((name for name in (TOKEN, *_KEYS, _FILE) if env.get(name)), "")
        return cls(
            variable=variable,
            value=env.get(variable, "").strip(),
            impersonated=env.get(_IMPERSONATED, "").strip(),
        )

    @property
    def is_default(self) -> bool:
        """Return whether it is the application default, as itself."""
        return not self.variable and not self.impersonated

    def source(self) -> str | Path:
        """Return the token, the JSON of a key, or the path of its file.

        Raises CloudAuthError for a file that is not there.
        """
        if self.variable == TOKEN or self.key_text:
            return self.value
        path = Path(self.value).expanduser()
        if not path.is_file():
            raise CloudAuthError(
                f"{self.variable} = {str(path)!r}: there is no such file. Give the file of a key, "
                f"or take the variable away: unset {self.variable}. {_LOG_IN}"
            )
        return path

    @property
    def key_text(self) -> str:
        """Return the JSON of a key that the variable holds itself; empty for any other login."""
        return self.value if self.variable != TOKEN and self.value.startswith("{") else ""

    def for_gcloud(self, *, key_file: str) -> dict[str, str]:
        """Return the variables by which gcloud takes the same login.

        `key_file` has `key_text`: gcloud reads a key from a file alone.
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
        """Return how to come by credentials that are valid."""
        if self.variable == TOKEN:
            return f"Make a new token: export {TOKEN}=$(gcloud auth print-access-token)"
        if self.variable:
            return (
                f"Give a key that is valid in {self.variable}, or take the variable away: unset "
                f"{self.variable}. {_LOG_IN}"
            )
        return _LOG_IN

    def refusal(self, said: str) -> str:
        """Return the cause and the fix where Google refuses these credentials, with `said`.

        No role is missing then, but for the right to act as another account.
        """
        if self.impersonated and _MAY_NOT_ACT.search(said):
            return (
                f"{_IMPERSONATED} = {self.impersonated!r}: there is no such account, or this login "
                "may not act as it. It needs roles/iam.serviceAccountTokenCreator on that account, "
                "and its project the API iamcredentials.googleapis.com"
            )
        whose = f"Google refuses the credentials ({self.describe()}): "
        if _WRONG_CLOCK.search(said):
            return f"{whose}this machine's clock is wrong. Set it, then repeat the command"
        if self.variable == TOKEN:
            cause = (
                "an access token is good for one hour, and this one has expired or is not a token"
            )
        elif self.variable:
            cause = "the key was deleted or replaced, or its account is disabled or gone"
        else:
            cause = "the login has expired or was revoked"
        return f"{whose}{cause}. {self.renewal()}"

    def describe(self) -> str:
        """Return where the credentials are from, in words."""
        whose = self.variable or "application default"
        return f"{whose}, as {self.impersonated}" if self.impersonated else whose
