"""Kubernetes' expansion of a container's command."""

from __future__ import annotations

import re
from collections.abc import Mapping


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Return the text with known $(NAME) replaced; $$ escapes a dollar.

    Source: third_party/forked/golang/expansion/expand.go of kubernetes.
    """

    def replaced(found: re.Match[str]) -> str:
        if found[0] == "$$":
            return "$"
        return variables.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", replaced, text)
