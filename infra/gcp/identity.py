"""Who the nodes are to Google: a service account of their own, without any right by itself."""

from __future__ import annotations

from dataclasses import dataclass

import pulumi
from pulumi import ComponentResource, ResourceOptions
from pulumi_gcp import serviceaccount

from infra.gcp.labels import IGNORED, mark


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentityArgs:
    """Arguments of an identity."""

    cluster: str
    labels: dict[str, str]


class ClusterIdentity(ComponentResource):
    """The nodes' service account. `ResultsBucket` gives it what it may do there, and no more."""

    email: pulumi.Output[str]

    def __init__(self, name: str, args: IdentityArgs, opts: ResourceOptions | None = None) -> None:
        """Make it under `name`."""
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
