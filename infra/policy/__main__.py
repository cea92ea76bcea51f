"""Entry point of the policy pack: `pulumi preview --policy-pack infra/policy`."""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    """Serve the pack until Pulumi ends the process."""
    # Pulumi prepends this folder to sys.path, but the rules are in the repository's root.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from infra.policy.pack import serve

    serve()


if __name__ == "__main__":
    main()
