"""The cluster's network. Only SSH is allowed from the internet; nodes can reach each other."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

import pulumi
from pulumi import ComponentResource, Input, ResourceOptions
from pulumi_gcp import compute, dns

from infra.gcp.labels import IGNORED, mark
from infra.google_address_ranges import RESTRICTED
from infra.node_addresses import FILESTORE_RANGE, SUBNET
from payload.machines.inventory import RANK_PORTS
from payload.stack.resource_labels import EXPIRES_LABEL
from payload.stack.stack_settings import MTU

NFS_PORT = "2049"

# SSH, the ranks' rendezvous, and the kernel's ephemeral ports, which gloo and mpirun use.
NODE_PORTS = ("22", f"{RANK_PORTS[0]}-{RANK_PORTS[-1]}", "32768-60999")
_EVERYWHERE = "0.0.0.0/0"


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkArgs:
    """Arguments of ClusterNetwork."""

    cluster: str
    region: str
    mtu: int
    flow_logs: bool
    nat: bool
    ssh_source: str
    """Address range from which SSH is allowed."""
    ssh_to: str | None
    """The only address that accepts SSH; None if `ssh_source` can reach only the head."""
    shared_storage: str
    """`nfs` opens the head's NFS port, `filestore` opens FILESTORE_RANGE, `none` opens neither."""
    node_account: Input[str]
    """E-mail address of the nodes' service account, to which firewall rules apply."""
    labels: dict[str, str]


class ClusterNetwork(ComponentResource):
    """VPC, subnet and firewall, with either NAT or a DNS zone for Google's APIs."""

    subnetwork_id: pulumi.Output[str]
    network_name: pulumi.Output[str]

    def __init__(self, name: str, args: NetworkArgs, opts: ResourceOptions | None = None) -> None:
        """Create the resources under `name`."""
        super().__init__("tileforge:infra:ClusterNetwork", name, {}, opts)
        self._args = args
        # Google only changes the MTU of a network without running machines. So a new MTU requires a
        # new network with a different name: Pulumi creates the new network first and deletes the
        # old one last.
        self._suffix = "" if args.mtu == MTU else f"-{args.mtu}"
        self._child = ResourceOptions(parent=self, ignore_changes=list(IGNORED))
        # Rules keep their names, so Pulumi must delete the old rule before it creates the new one.
        self._rule = ResourceOptions.merge(self._child, ResourceOptions(delete_before_replace=True))
        network = compute.Network(
            f"{args.cluster}-network",
            name=f"{args.cluster}-network{self._suffix}",
            description=mark(args.labels),
            auto_create_subnetworks=False,
            routing_mode="REGIONAL",
            mtu=args.mtu,
            opts=self._child,
        )
        subnetwork = self._subnetwork(network)
        if args.nat:
            self._nat(network, subnetwork)
        else:
            self._restricted_apis(network)
        self._ingress(network)
        self._egress(network)
        self.subnetwork_id = subnetwork.id
        self.network_name = network.name
        self.register_outputs({"subnetwork_id": self.subnetwork_id, "network_id": network.id})

    def _subnetwork(self, network: compute.Network) -> compute.Subnetwork:
        logs = compute.SubnetworkLogConfigArgs(
            aggregation_interval="INTERVAL_5_SEC",
            flow_sampling=1.0,
            metadata="INCLUDE_ALL_METADATA",
        )
        return compute.Subnetwork(
            f"{self._args.cluster}-subnet",
            name=f"{self._args.cluster}-subnet{self._suffix}",
            description=mark(self._args.labels),
            network=network.id,
            region=self._args.region,
            ip_cidr_range=SUBNET,
            private_ip_google_access=True,
            log_config=logs if self._args.flow_logs else None,
            opts=self._child,
        )

    def _nat(self, network: compute.Network, subnetwork: compute.Subnetwork) -> None:
        router = compute.Router(
            f"{self._args.cluster}-router",
            name=f"{self._args.cluster}-router{self._suffix}",
            description=mark(self._args.labels),
            network=network.id,
            region=self._args.region,
            opts=self._child,
        )
        compute.RouterNat(
            f"{self._args.cluster}-nat",
            name=f"{self._args.cluster}-nat",
            router=router.name,
            region=self._args.region,
            nat_ip_allocate_option="AUTO_ONLY",
            source_subnetwork_ip_ranges_to_nat="LIST_OF_SUBNETWORKS",
            subnetworks=[
                compute.RouterNatSubnetworkArgs(
                    name=subnetwork.id, source_ip_ranges_to_nats=["ALL_IP_RANGES"]
                )
            ],
            log_config=compute.RouterNatLogConfigArgs(enable=True, filter="ERRORS_ONLY"),
            opts=ResourceOptions(parent=self),
        )

    def _restricted_apis(self, network: compute.Network) -> None:
        """Resolve all names of Google's APIs to addresses in RESTRICTED, as Google documents."""
        zone = dns.ManagedZone(
            f"{self._args.cluster}-googleapis",
            name=f"{self._args.cluster}-googleapis",
            description="Google's APIs at restricted.googleapis.com",
            dns_name="googleapis.com.",
            visibility="private",
            private_visibility_config=dns.ManagedZonePrivateVisibilityConfigArgs(
                networks=[dns.ManagedZonePrivateVisibilityConfigNetworkArgs(network_url=network.id)]
            ),
            labels=self._args.labels,
            force_destroy=True,
            opts=ResourceOptions(parent=self, ignore_changes=[f'labels["{EXPIRES_LABEL}"]']),
        )
        for kind, record, values in (
            ("A", "restricted", [str(each) for each in ipaddress.ip_network(RESTRICTED)]),
            ("CNAME", "*", ["restricted.googleapis.com."]),
        ):
            dns.RecordSet(
                f"{self._args.cluster}-googleapis-{kind.lower()}",
                managed_zone=zone.name,
                name=f"{record}.googleapis.com.",
                type=kind,
                ttl=300,
                rrdatas=values,
                opts=ResourceOptions(parent=self),
            )

    def _ingress(self, network: compute.Network) -> None:
        compute.Firewall(
            f"{self._args.cluster}-allow-ssh",
            name=f"{self._args.cluster}-allow-ssh",
            description=mark(
                self._args.labels, "SSH from the operator, or from Google's proxy for tunnels"
            ),
            network=network.id,
            direction="INGRESS",
            source_ranges=[self._args.ssh_source],
            destination_ranges=[self._args.ssh_to] if self._args.ssh_to else None,
            target_service_accounts=[self._args.node_account],
            allows=[compute.FirewallAllowArgs(protocol="tcp", ports=["22"])],
            log_config=self._log(),
            opts=self._rule,
        )
        compute.Firewall(
            f"{self._args.cluster}-allow-nodes",
            name=f"{self._args.cluster}-allow-nodes",
            description=mark(
                self._args.labels, "Between the nodes: ssh, where ranks meet, gloo and mpirun"
            ),
            network=network.id,
            direction="INGRESS",
            source_service_accounts=[self._args.node_account],
            target_service_accounts=[self._args.node_account],
            allows=self._between_nodes(),
            opts=self._rule,
        )

    def _egress(self, network: compute.Network) -> None:
        # Port 443 is for package indexes and Google's APIs (without NAT, only the APIs). Port 80 is
        # for Ubuntu's mirrors, whose packages are signed.
        to, ports = (_EVERYWHERE, ["80", "443"]) if self._args.nat else (RESTRICTED, ["443"])
        self._allow_egress(
            network, "web", [to], [compute.FirewallAllowArgs(protocol="tcp", ports=ports)]
        )
        self._allow_egress(network, "nodes", [SUBNET], self._between_nodes())
        if self._args.shared_storage == "filestore":
            nfs = compute.FirewallAllowArgs(protocol="tcp", ports=[NFS_PORT])
            self._allow_egress(network, "filestore", [FILESTORE_RANGE], [nfs])
        compute.Firewall(
            f"{self._args.cluster}-deny-egress",
            name=f"{self._args.cluster}-deny-egress",
            description=mark(self._args.labels, "Nothing else leaves"),
            network=network.id,
            direction="EGRESS",
            priority=65_534,
            destination_ranges=[_EVERYWHERE],
            denies=[compute.FirewallDenyArgs(protocol="all")],
            log_config=self._log(),
            opts=self._rule,
        )

    def _allow_egress(
        self,
        network: compute.Network,
        what: str,
        to: list[str],
        allows: list[compute.FirewallAllowArgs],
    ) -> None:
        compute.Firewall(
            f"{self._args.cluster}-egress-{what}",
            name=f"{self._args.cluster}-egress-{what}",
            description=mark(self._args.labels),
            network=network.id,
            direction="EGRESS",
            priority=1000,
            destination_ranges=to,
            target_service_accounts=[self._args.node_account],
            allows=allows,
            opts=self._rule,
        )

    def _log(self) -> compute.FirewallLogConfigArgs | None:
        """Return the config that logs connections from outside and denied connections."""
        if not self._args.flow_logs:
            return None
        return compute.FirewallLogConfigArgs(metadata="INCLUDE_ALL_METADATA")

    def _between_nodes(self) -> list[compute.FirewallAllowArgs]:
        nfs = [NFS_PORT] if self._args.shared_storage == "nfs" else []
        return [
            compute.FirewallAllowArgs(protocol="tcp", ports=[*NODE_PORTS, *nfs]),
            compute.FirewallAllowArgs(protocol="icmp"),
        ]
