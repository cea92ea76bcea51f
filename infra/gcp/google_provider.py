"""The Google Cloud provider for the resources of all components."""

from __future__ import annotations

import pulumi
import pulumi_gcp


def on_google(*, project: str, region: str) -> pulumi.ResourceOptions:
    """Return the options that create a component's resources in this project and region."""
    google = pulumi_gcp.Provider("google", project=project, region=region)
    return pulumi.ResourceOptions(providers=[google])
