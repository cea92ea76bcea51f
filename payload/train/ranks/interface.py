"""Network interface lookup, under the module name that exported MPIJobs import."""

from payload.machines.network_interface import interface_towards

__all__ = ["interface_towards"]
