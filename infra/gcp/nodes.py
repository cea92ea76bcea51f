"""The machines: plain instances with boot disks. Google deletes them at their lifetime limit."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from pulumi import ComponentResource, Input, Output, Resource, ResourceOptions
from pulumi_gcp import compute

from infra.config import ClusterConfig
from infra.gcp.labels import IGNORED, mark
from infra.gcp.scheduling import scheduling
from infra.node_addresses import node_address, node_name
from payload.stack.resource_labels import EXPIRES_LABEL

# A change of these settings rebuilds the nodes. An update in place would stop the machine, which
# resets its run time, and cloud-init would not run again.
_REBUILDS = (
    *("machine_type", "spot", "max_lifetime", "disk_type", "disk_gb", "head_disk_gb", "image"),
    *("threads_per_core", "tier1", "confidential", "kms_key", "mtu"),
)
# These are not changed on an existing machine; a rebuilt machine gets the program's values.
_IGNORED_CHANGES = (
    # People can change these: attached disks, network tags, a resized or labelled boot disk. Labels
    # of the machine are not listed, because the provider manages only the labels that it set.
    *("attachedDisks", "tags"),
    *("bootDisk.initializeParams.size", "bootDisk.initializeParams.labels"),
    # Written by the console's SSH button (cluster-toolkit, pull request 316).
    'metadata["ssh-keys"]',
    # Depends on the machine's start time, but the program only has the current time.
    f'labels["{EXPIRES_LABEL}"]',
    # If one node becomes several, or several become one, the head keeps its placement and its disk.
    *("resourcePolicies", "scheduling.onHostMaintenance"),
)
# A3 and A2 Ultra always have local SSDs.
_IGNORED_CHANGES_WITH_GPUS = ("scratchDisks",)
# Performance of a hyperdisk-balanced disk without surcharge. Google's default is higher and costs
# more.
FREE_IOPS, FREE_MIB_PER_S = 3_000, 140
_BUCKET_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesArgs:
    """Arguments of ClusterNodes."""

    config: ClusterConfig
    user_data: str
    boots_alike: tuple[str, str]
    """User-data of the head and of a worker. A change rebuilds the machine
    (`bootstrap_values.rebuild_triggers`)."""
    kept_metadata: tuple[str, ...]
    """Keys of metadata that people added to machines."""
    shared_source: Input[str] | None
    """SERVER:/PATH of the Filestore instance that all nodes mount; None without an instance."""
    labels: dict[str, str]
    subnetwork: Input[str]
    service_account: Input[str]
    after: tuple[Resource, ...]
    """Resources that the nodes depend on, such as the NAT and the firewall, which package downloads
    need."""


class ClusterNodes(ComponentResource):
    """All nodes, and the placement policy by which Google puts them physically close together."""

    instances: list[compute.Instance]
    """Instances in the inventory's order; the first is the head."""

    def __init__(self, name: str, args: NodesArgs, opts: ResourceOptions | None = None) -> None:
        """Create the resources under `name`."""
        super().__init__("tileforge:infra:ClusterNodes", name, {}, opts)
        self._args = args
        # Also for a single node, because the head of a former larger cluster keeps the policy.
        placement = self._placement() if args.config.has_placement() else None
        self.instances = [
            self._instance(
                index,
                placement=placement if args.config.is_compact() else None,
                trigger=replacement_trigger(args.config, args.boots_alike[min(index, 1)]),
            )
            for index in range(args.config.node_count)
        ]
        self.register_outputs(
            {"names": [instance.name for instance in self.instances], "labels": self.labels()}
        )

    def head_external_address(self) -> Output[str | None]:
        """Return the head's external address, or None."""
        if self._args.config.access_mode != "direct":
            return Output.from_input(None)
        return self.instances[0].network_interfaces.apply(_external_address)

    def labels(self) -> Output[list[dict[str, str] | None]]:
        """Return each instance's recorded labels, which include its expiry."""
        return Output.all(*(instance.labels for instance in self.instances))

    def _placement(self) -> compute.ResourcePolicy:
        config = self._args.config
        return compute.ResourcePolicy(
            f"{config.cluster}-placement",
            name=f"{config.cluster}-placement",
            description=mark(self._args.labels),
            region=config.region,
            group_placement_policy=compute.ResourcePolicyGroupPlacementPolicyArgs(
                collocation="COLLOCATED"
            ),
            opts=ResourceOptions(parent=self, ignore_changes=list(IGNORED)),
        )

    def _instance(
        self, index: int, *, placement: compute.ResourcePolicy | None, trigger: str
    ) -> compute.Instance:
        config = self._args.config
        return compute.Instance(
            node_name(config, index),
            name=node_name(config, index),
            zone=config.zone,
            machine_type=config.machine_type,
            boot_disk=self._boot_disk(index),
            network_interfaces=[self._interface(index)],
            network_performance_config=compute.InstanceNetworkPerformanceConfigArgs(
                total_egress_bandwidth_tier="TIER_1"
            )
            if config.tier1
            else None,
            advanced_machine_features=compute.InstanceAdvancedMachineFeaturesArgs(
                threads_per_core=config.threads_per_core
            )
            if config.machine().has_smt
            else None,
            scheduling=scheduling(config),
            resource_policies=placement.self_link if placement else None,
            metadata=self._metadata(),
            labels=self._args.labels,
            service_account=compute.InstanceServiceAccountArgs(
                email=self._args.service_account, scopes=[_BUCKET_SCOPE]
            ),
            shielded_instance_config=compute.InstanceShieldedInstanceConfigArgs(
                enable_secure_boot=True, enable_vtpm=True, enable_integrity_monitoring=True
            ),
            confidential_instance_config=compute.InstanceConfidentialInstanceConfigArgs(
                confidential_instance_type="TDX"
            )
            if config.confidential
            else None,
            can_ip_forward=False,
            deletion_protection=False,
            opts=ResourceOptions(
                parent=self,
                depends_on=self._args.after,
                delete_before_replace=True,
                replacement_trigger=trigger,
                ignore_changes=[
                    *_IGNORED_CHANGES,
                    *(f'metadata["{key}"]' for key in self._args.kept_metadata),
                    *(_IGNORED_CHANGES_WITH_GPUS if config.machine().gpus else ()),
                ],
            ),
        )

    def _boot_disk(self, index: int) -> compute.InstanceBootDiskArgs:
        config = self._args.config
        hyperdisk = config.boot_disk_type() == "hyperdisk-balanced"
        return compute.InstanceBootDiskArgs(
            auto_delete=True,
            kms_key_self_link=config.kms_key or None,
            initialize_params=compute.InstanceBootDiskInitializeParamsArgs(
                image=config.image,
                type=config.boot_disk_type(),
                size=config.boot_disk_gb(index=index),
                provisioned_iops=FREE_IOPS if hyperdisk else None,
                provisioned_throughput=FREE_MIB_PER_S if hyperdisk else None,
                labels=self._args.labels,
            ),
        )

    def _interface(self, index: int) -> compute.InstanceNetworkInterfaceArgs:
        # Only the head has an external address, and only if the access mode is direct.
        external = self._args.config.access_mode == "direct" and index == 0
        return compute.InstanceNetworkInterfaceArgs(
            subnetwork=self._args.subnetwork,
            network_ip=node_address(index),
            nic_type="GVNIC",
            stack_type="IPV4_ONLY",
            access_configs=[
                compute.InstanceNetworkInterfaceAccessConfigArgs(network_tier="PREMIUM")
            ]
            if external
            else [],
        )

    def _metadata(self) -> dict[str, Input[str]]:
        os_login = self._args.config.access_mode == "oslogin"
        source = self._args.shared_source
        shared = {} if source is None else {"shared-source": source}
        return {
            **shared,
            "user-data": self._args.user_data,
            # Set explicitly, so that the project's setting does not decide who can log in.
            "enable-oslogin": "TRUE" if os_login else "FALSE",
            "block-project-ssh-keys": "TRUE",
            "serial-port-enable": "FALSE",
            # Nodes publish their host keys as guest attributes.
            "enable-guest-attributes": "TRUE",
        }


def replacement_trigger(config: ClusterConfig, user_data: str) -> str:
    """Return a digest that changes if the nodes must be rebuilt."""
    values = [user_data, *(str(getattr(config, name)) for name in _REBUILDS)]
    values.append(str(config.has_placement()))
    return hashlib.sha256("\0".join(values).encode()).hexdigest()


def _external_address(
    interfaces: Sequence[compute.outputs.InstanceNetworkInterface],
) -> str | None:
    configs = interfaces[0].access_configs or []
    return configs[0].nat_ip if configs else None
