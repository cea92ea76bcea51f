"""Network interface lookup, importable under the name that exported MPIJobs use."""

from payload.machines.network_interface import interface_towards

__all__ = ["interface_towards"]
