"""The nodes' service accounts, which cost nothing but stand in the way of the next `up`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import quote

from payload.orchestrate.cloud.google import Google
from payload.orchestrate.cloud.resources import CLUSTER_LABEL, SERVICE_ACCOUNT, Resource, marks

# infra/identity.py gives it, from the first on; descriptions came later.
_DISPLAYED = re.compile(r"Nodes of the Tileforge cluster ([a-z0-9-]+)")


def service_accounts(google: Google) -> Iterator[Resource]:
    """Those of clusters; a name alone says little about an account, so others are left out."""
    path, token = f"/v1/projects/{google.project}/serviceAccounts?pageSize=100", ""
    while True:
        more = f"&pageToken={quote(token)}" if token else ""
        answer = google.get_json("iam", path + more, what="listing service accounts")
        for account in answer.get("accounts", []):
            labels = marks(account.get("description", ""))
            shown = _DISPLAYED.fullmatch(account.get("displayName", ""))
            if shown and CLUSTER_LABEL not in labels:
                labels[CLUSTER_LABEL] = shown[1]
            yield Resource(
                kind=SERVICE_ACCOUNT, name=account["email"], location="global", labels=labels
            )
        token = answer.get("nextPageToken", "")
        if not token:
            return


def remove_service_account(google: Google, email: str) -> None:
    """Remove one; it is gone at once. Raises as Google.ask does."""
    path = f"/v1/projects/{google.project}/serviceAccounts/{quote(email)}"
    google.delete("iam", path, what=f"removing {SERVICE_ACCOUNT} {email}")
