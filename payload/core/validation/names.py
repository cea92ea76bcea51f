"""Patterns of the names that become words of commands and parts of paths."""

from __future__ import annotations

import re

RUN_ID = re.compile(r"(?!latest\Z)[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""A run id names a folder here and on every node, so it can never lead out of `runs`."""
NODE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")
"""A node's name becomes a word of command lines and ssh_config; it never starts like an option."""
MEMBER_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
"""A launcher's or a site's name: that of its file."""
SHA256 = re.compile(r"[0-9a-f]{64}")
GIT_COMMIT = re.compile(r"[0-9a-f]{40}")
