"""CONTRACT: where the cluster program puts files on a node."""

from __future__ import annotations

from pathlib import PurePosixPath

BOOTSTRAP_STATE = "/var/lib/tileforge/bootstrap.json"
"""How far a node's set-up is."""
VENV = PurePosixPath("/opt/tileforge/venv")
"""The environment of Python that a run starts its programs from."""
MONITORING_FOLDER = PurePosixPath("/etc/tileforge/monitoring")
"""Dashboards, and the configuration of the servers that show them."""
