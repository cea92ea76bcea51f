"""Patterns of names that become command arguments and parts of paths."""

from __future__ import annotations

import re

RUN_ID = re.compile(r"(?!latest\Z)[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""A run id names a folder on every machine, so the pattern allows no path out of `runs`."""
NODE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")
"""A node's name is used in command lines and ssh_config; it cannot look like an option."""
MEMBER_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
"""Name of a launcher or a site, which is its file's name."""
SHA256 = re.compile(r"[0-9a-f]{64}")
GIT_COMMIT = re.compile(r"[0-9a-f]{40}")
