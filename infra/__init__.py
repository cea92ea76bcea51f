"""The Pulumi program's parts: the cluster's machines, network and keys, and a node's user-data."""
