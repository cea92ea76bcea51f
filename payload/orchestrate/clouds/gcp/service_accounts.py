"""Lists and removes service accounts of clusters."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import quote

from payload.core.validation.fields import checked
from payload.orchestrate.clouds.gcp.client import (
    Google,
)
from payload.orchestrate.clouds.gcp.removal_order import Resource, labels_in_description
from payload.orchestrate.clouds.gcp.resource_kinds import SERVICE_ACCOUNT
from payload.stack.google_name_patterns import CLOUD_NAME
from payload.stack.resource_labels import CLUSTER_LABEL

# The display name that infra/gcp/identity.py sets. Older versions did not set a description.
_DISPLAYED = re.compile(r"Nodes of the Tileforge cluster ([a-z0-9-]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Account:
    email: str = checked(pattern=CLOUD_NAME, wanted="an e-mail address")
    display_name: str = checked("", key="displayName")
    description: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _AccountPage:
    accounts: tuple[_Account, ...] = ()
    next_page_token: str = checked("", key="nextPageToken")


def service_accounts(google: Google) -> Iterator[Resource]:
    """Yield the project's service accounts, with labels from their descriptions or names."""
    path, what = f"/v1/projects/{google.project}/serviceAccounts?pageSize=100", "service accounts"
    for page in google.get_pages("iam", path, what=f"listing {what}", shape=_AccountPage):
        for account in page.accounts:
            labels = labels_in_description(account.description)
            shown = _DISPLAYED.fullmatch(account.display_name)
            if shown and CLUSTER_LABEL not in labels:
                labels[CLUSTER_LABEL] = shown[1]
            yield Resource(
                kind=SERVICE_ACCOUNT, name=account.email, location="global", labels=labels
            )


def remove_service_account(google: Google, email: str) -> None:
    """Remove a service account; return when it is gone. Raises the errors of Google.call."""
    path = f"/v1/projects/{google.project}/serviceAccounts/{quote(email)}"
    google.delete("iam", path, what=f"removing {SERVICE_ACCOUNT} {email}")
