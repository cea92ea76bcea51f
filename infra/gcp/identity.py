"""The nodes' service account, which has no permissions when it is created."""

from __future__ import annotations

from dataclasses import dataclass

import pulumi
from pulumi import ComponentResource, ResourceOptions
from pulumi_gcp import serviceaccount

from infra.gcp.labels import IGNORED, mark


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentityArgs:
    """Arguments of ClusterIdentity."""

    cluster: str
    labels: dict[str, str]


class ClusterIdentity(ComponentResource):
    """The nodes' service account. Only `ResultsBucket` grants it permissions."""

    email: pulumi.Output[str]

    def __init__(self, name: str, args: IdentityArgs, opts: ResourceOptions | None = None) -> None:
        """Create the account under `name`."""
        super().__init__("tileforge:infra:ClusterIdentity", name, {}, opts)
        account = serviceaccount.Account(
            f"{args.cluster}-nodes",
            account_id=f"{args.cluster}-nodes",
            display_name=f"Nodes of the Tileforge cluster {args.cluster}",
            description=mark(args.labels),
            opts=ResourceOptions(parent=self, ignore_changes=list(IGNORED)),
        )
        self.email = account.email
        self.register_outputs({"email": self.email})
