"""The Filestore instance that all nodes mount, in the cluster's private network."""

from __future__ import annotations

from dataclasses import dataclass

from pulumi import ComponentResource, Input, Output, Resource, ResourceOptions
from pulumi_gcp import filestore

from infra.config import ClusterConfig
from infra.gcp.labels import IGNORED, mark
from infra.node_addresses import FILESTORE_RANGE, node_address
from payload.stack.resource_labels import EXPIRES_LABEL

SHARE = "shared"
# NFS 4.1 needs only port 2049. The basic tiers support only NFS 3, which needs five more ports, and
# some of these must be open on the nodes.
# https://cloud.google.com/filestore/docs/supported-protocols
TIER, PROTOCOL = "ZONAL", "NFS_V4_1"


@dataclass(frozen=True, slots=True, kw_only=True)
class FilestoreArgs:
    """Arguments of SharedFilestore."""

    config: ClusterConfig
    network: Input[str]
    """Name of the cluster's network."""
    labels: dict[str, str]
    after: tuple[Resource, ...]
    """Resources that the instance depends on, such as the permission to use its key."""


class SharedFilestore(ComponentResource):
    """A Filestore instance, deleted with the stack."""

    source: Output[str]
    """SERVER:/PATH to mount."""

    def __init__(self, name: str, args: FilestoreArgs, opts: ResourceOptions | None = None) -> None:
        """Create the instance under `name`."""
        super().__init__("tileforge:infra:SharedFilestore", name, {}, opts)
        self.source = self._instance(args).networks.apply(
            lambda networks: f"{(networks[0].ip_addresses or ['unknown'])[0]}:/{SHARE}"
        )
        self.register_outputs({"source": self.source})

    def _instance(self, args: FilestoreArgs) -> filestore.Instance:
        config = args.config
        return filestore.Instance(
            f"{config.cluster}-shared",
            name=f"{config.cluster}-shared",
            description=mark(args.labels),
            location=config.zone,
            tier=TIER,
            protocol=PROTOCOL,
            file_shares=filestore.InstanceFileSharesArgs(
                name=SHARE, capacity_gb=config.filestore_gb, nfs_export_options=_exports(config)
            ),
            networks=[
                filestore.InstanceNetworkArgs(
                    network=args.network,
                    modes=["MODE_IPV4"],
                    connect_mode="DIRECT_PEERING",
                    reserved_ip_range=FILESTORE_RANGE,
                )
            ],
            kms_key_name=config.kms_key or None,
            labels=args.labels,
            # The instance has no lifetime limit, so the stack must be able to delete it.
            deletion_protection_enabled=False,
            opts=ResourceOptions(
                parent=self,
                # A change of zone would create a new, empty instance. Nodes in all zones of the
                # region can reach the existing instance, so it is kept with its data.
                ignore_changes=["location", f'labels["{EXPIRES_LABEL}"]', *IGNORED],
                depends_on=list(args.after),
            ),
        )


def _exports(config: ClusterConfig) -> list[filestore.InstanceFileSharesNfsExportOptionArgs]:
    """Return export options: only nodes can mount the share, and only the head has root access."""
    head, *workers = (node_address(index) for index in range(config.node_count))
    rows = [("NO_ROOT_SQUASH", [head])] + ([("ROOT_SQUASH", workers)] if workers else [])
    return [
        filestore.InstanceFileSharesNfsExportOptionArgs(
            access_mode="READ_WRITE", squash_mode=squash, ip_ranges=addresses
        )
        for squash, addresses in rows
    ]
