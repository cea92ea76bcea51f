"""The cluster program for Pulumi: loads settings, builds components, exports the inventory.

Pulumi runs it for `pulumi preview`, `up` and `destroy`. docs/guides/google_cloud.md lists the
commands.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pulumi

from infra.bootstrap_values import rebuild_triggers, user_data
from infra.cloud_init import BootstrapFiles
from infra.config_reading import load_config
from infra.cost import describe, price_of_cluster
from infra.error_display import shown_plainly
from infra.gcp.google_provider import on_google
from infra.gcp.identity import ClusterIdentity, IdentityArgs
from infra.gcp.inventory_output import inventory_output
from infra.gcp.kms_key_access import KeyAccess, KeyAccessArgs
from infra.gcp.labels import cluster_labels, last_expiry, program_identity
from infra.gcp.network import ClusterNetwork, NetworkArgs
from infra.gcp.nodes import ClusterNodes, NodesArgs
from infra.gcp.shared_storage import FilestoreArgs, SharedFilestore
from infra.gcp.storage import ResultsBucket, StorageArgs
from infra.last_measured_speed import last_measured_speed
from infra.node_addresses import node_address
from payload import __version__
from payload.pricing.cloud_prices import read_catalog
from payload.stack.cluster_files import cluster_path

root = Path(__file__).resolve().parent
with shown_plainly():
    config, authorized_keys = load_config(root)
    identity_of_cluster = program_identity(root, config.cluster)
    catalog = read_catalog(cluster_path(root), now_unix=time.time())
    cost = price_of_cluster(config, catalog)
    files = BootstrapFiles.load(root / "bootstrap")
    boot_text = user_data(config, files, authorized_keys=authorized_keys, version=__version__)
    boot_parts = rebuild_triggers(
        config, files, has_keys=bool(authorized_keys), version=__version__
    )
speed = last_measured_speed(
    root / "runs", machine_type=config.machine_type, node_count=config.node_count
)
pulumi.info(describe(config, cost, speed=speed, catalog=catalog))

google = on_google(project=config.project, region=config.region)
labels = cluster_labels(
    cluster=config.cluster,
    identity=identity_of_cluster,
    expires_unix=int(time.time()) + (config.max_lifetime_s() or 0),
    extra=config.extra_labels(),
)

identity = ClusterIdentity(
    config.cluster, IdentityArgs(cluster=config.cluster, labels=labels), opts=google
)
network = ClusterNetwork(
    config.cluster,
    NetworkArgs(
        cluster=config.cluster,
        region=config.region,
        mtu=config.mtu,
        flow_logs=config.flow_logs,
        nat=config.egress == "nat",
        ssh_source=config.ssh_source(),
        # The operator can only reach the head; workers have no external address.
        ssh_to=None if config.access_mode == "direct" else f"{node_address(0)}/32",
        shared_storage=config.shared_storage,
        node_account=identity.email,
        labels=labels,
    ),
    opts=google,
)
key_access = None
if config.kms_key and config.kms_grant:
    key_access = KeyAccess(
        config.cluster,
        KeyAccessArgs(
            cluster=config.cluster,
            project=config.project,
            kms_key=config.kms_key,
            makes_bucket=config.bucket == "create",
            makes_filestore=config.shared_storage == "filestore",
        ),
        opts=google,
    )
results = ResultsBucket(
    config.cluster,
    StorageArgs(
        cluster=config.cluster,
        region=config.region,
        bucket=config.bucket,
        kms_key=config.kms_key,
        labels=labels,
        node_account=identity.email,
        after=(key_access,) if key_access else (),
    ),
    opts=google,
)
filestore = None
if config.shared_storage == "filestore":
    filestore = SharedFilestore(
        config.cluster,
        FilestoreArgs(
            config=config,
            network=network.network_name,
            labels=labels,
            after=(key_access,) if key_access else (),
        ),
        opts=google,
    )
nodes = ClusterNodes(
    config.cluster,
    NodesArgs(
        config=config,
        user_data=boot_text,
        boots_alike=boot_parts,
        # Set by `up`, which queries Google. Keys with invalid characters are ignored.
        kept_metadata=tuple(
            re.findall(r"[A-Za-z0-9_-]+", os.environ.get("TILEFORGE_METADATA_KEPT", ""))
        ),
        shared_source=filestore.source if filestore else None,
        labels=labels,
        subnetwork=network.subnetwork_id,
        service_account=identity.email,
        after=(network, key_access) if key_access else (network,),
    ),
    opts=google,
)

pulumi.export("inventory", inventory_output(config, cost, nodes=nodes, results=results))
pulumi.export("hourly_usd", cost.hourly_usd)
pulumi.export("expires", nodes.labels().apply(last_expiry))
pulumi.export("project", config.project)
pulumi.export("region", config.region)
