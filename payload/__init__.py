"""Tileforge's training payload: everything that runs on the operator's machine and on the nodes."""

__version__ = "0.1.0"
