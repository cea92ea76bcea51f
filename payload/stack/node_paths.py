"""CONTRACT: paths of the cluster program's files on a node."""

from __future__ import annotations

from pathlib import PurePosixPath

BOOTSTRAP_STATE = "/var/lib/tileforge/bootstrap.json"
"""File with the state of a node's set-up."""
VENV = PurePosixPath("/opt/tileforge/venv")
"""Python environment of a run's programs."""
MONITORING_FOLDER = PurePosixPath("/etc/tileforge/monitoring")
"""Dashboards, and the configuration of their servers."""
