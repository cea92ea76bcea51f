"""CONTRACT: the Google login that the environment names, for Google's clients and for gcloud. Pure.

It is read as Google's Pulumi provider reads it, in its order: an access token, a key or its
file, then application default credentials; and as whom they act (google/transport/config.go of
terraform-provider-google).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from payload.errors import CloudAuthError

TOKEN = "GOOGLE_OAUTH_ACCESS_TOKEN"
_KEYS = ("GOOGLE_CREDENTIALS", "GOOGLE_CLOUD_KEYFILE_JSON", "GCLOUD_KEYFILE_JSON")
_FILE = "GOOGLE_APPLICATION_CREDENTIALS"
_IMPERSONATED = "GOOGLE_IMPERSONATE_SERVICE_ACCOUNT"
_LOG_IN = "Log in: gcloud auth application-default login"


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
        """Return what to do where these credentials are refused or have expired."""
        if self.impersonated:
            return (
                f"{_IMPERSONATED} = {self.impersonated!r}: your login needs "
                "roles/iam.serviceAccountTokenCreator on that account, and its project the API "
                "iamcredentials.googleapis.com"
            )
        if self.variable == TOKEN:
            return f"Make a new token: export {TOKEN}=$(gcloud auth print-access-token)"
        if self.variable:
            return f"Give a key that is valid in {self.variable}, or take the variable away"
        return _LOG_IN

    def describe(self) -> str:
        """Return where the credentials are from, in words."""
        whose = self.variable or "application default"
        return f"{whose}, as {self.impersonated}" if self.impersonated else whose
