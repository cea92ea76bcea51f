"""Connections to nodes: one node, a cluster, files, keys, programs sent to them."""
