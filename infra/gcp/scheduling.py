"""When Google may stop a machine, and what happens then. Pure."""

from __future__ import annotations

from pulumi_gcp import compute

from infra.config import ClusterConfig


def scheduling(config: ClusterConfig) -> compute.InstanceSchedulingArgs:
    """The same for every node of the cluster.

    - Every machine has a limit of its run time, and is deleted at it: on demand, a termination
      action is allowed with such a limit only (cluster-toolkit, pull request 4435).
    - No restart by itself: it would set the limit's clock back.
    - Spot means preemptible, ended at maintenance, and an action that is named; unnamed, the state
      flaps (cloud-foundation-fabric, pull request 778).
    - Compact placement, TDX and H3 do not migrate (cluster-toolkit, vm-instance/main.tf). Host
      maintenance stops them, and they keep their disks; `up` offers to start them.
    - No `desired_status`: any `pulumi up` would start a machine that a person stopped on purpose.
    """
    spot = config.uses_spot()
    stays = config.machine().live_migrates and not (
        spot or config.is_compact() or config.confidential
    )
    return compute.InstanceSchedulingArgs(
        provisioning_model="SPOT" if spot else "STANDARD",
        preemptible=spot,
        automatic_restart=False,
        on_host_maintenance="MIGRATE" if stays else "TERMINATE",
        instance_termination_action="DELETE",
        max_run_duration=compute.InstanceSchedulingMaxRunDurationArgs(
            seconds=config.max_lifetime_s() or 0
        ),
    )
