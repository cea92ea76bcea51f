"""Components of the Pulumi program: machines, network, keys, and a node's user-data."""
