"""Credentials for Google's clients in `payload.storage` and `payload.orchestrate`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from payload.core.errors import CloudAuthError
from payload.core.validation.json_text import parse_json
from payload.storage.google_environment_login import TOKEN, GoogleLogin

_SCOPES = ("https://www.googleapis.com/auth/cloud-platform",)


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings of Google's libraries that the user cannot act on.

    Not thread-safe: it changes the warnings of the whole process.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.filterwarnings("ignore", message=".*without a quota project.*")
        yield


def load_credentials(login: GoogleLogin) -> Any:
    """Return the credentials object of a login. Raises CloudAuthError."""
    import google.auth
    from google.auth import impersonated_credentials
    from google.auth.exceptions import GoogleAuthError
    from google.oauth2 import credentials as oauth2

    source = login.source() if login.variable else None
    credentials: Any
    try:
        if login.variable == TOKEN:
            token: Any = oauth2.Credentials
            credentials = token(source)
        elif isinstance(source, Path):
            credentials, _ = google.auth.load_credentials_from_file(str(source), scopes=_SCOPES)
        elif source is not None:
            key = parse_json(source, where=login.variable, error=CloudAuthError)
            credentials, _ = google.auth.load_credentials_from_dict(key, scopes=_SCOPES)
        else:
            credentials, _ = google.auth.default(scopes=_SCOPES)
    except (GoogleAuthError, AttributeError, KeyError, TypeError, ValueError):
        # The messages of Google's libraries quote the credentials.
        where = f"in {login.variable}" if login.variable else "on this machine"
        raise CloudAuthError(
            f"there are no usable Google Cloud credentials {where}. {login.renewal()}"
        ) from None
    if not login.impersonated:
        return credentials
    return impersonated_credentials.Credentials(
        source_credentials=credentials,
        target_principal=login.impersonated,
        target_scopes=list(_SCOPES),
    )
