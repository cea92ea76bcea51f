"""What runs inside Pulumi: the cluster's machines, network and keys, and what a node boots with."""
