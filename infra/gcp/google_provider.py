"""Google's provider, for the resources of all components."""

from __future__ import annotations

import pulumi
import pulumi_gcp


def on_google(*, project: str, region: str) -> pulumi.ResourceOptions:
    """Return the options of a component whose resources are in this project."""
    google = pulumi_gcp.Provider("google", project=project, region=region)
    return pulumi.ResourceOptions(providers=[google])
