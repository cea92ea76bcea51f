"""The name by which MPIJobs that `plan --export` wrote find the network interface of their node."""

from payload.machines.network_interface import interface_towards

__all__ = ["interface_towards"]
