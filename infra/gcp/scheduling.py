"""Google's scheduling options of a machine: spot, lifetime limit and host maintenance."""

from __future__ import annotations

from pulumi_gcp import compute

from infra.config import ClusterConfig


def scheduling(config: ClusterConfig) -> compute.InstanceSchedulingArgs:
    """Return the scheduling options, which are the same for every node.

    - Every machine is deleted at a run time limit. On-demand machines can only have a termination
      action together with such a limit (cluster-toolkit, pull request 4435).
    - No automatic restart, because it would reset the run time.
    - Spot machines must be preemptible, terminate at maintenance, and name a termination action;
      otherwise Pulumi reports a change each time (cloud-foundation-fabric, pull request 778).
    - Machines with compact placement or TDX, and H3, do not live-migrate (cluster-toolkit,
      vm-instance/main.tf). Host maintenance stops them, and they keep their disks; `up` offers to
      start them.
    - No `desired_status`: every `pulumi up` would start machines that people stopped on purpose.
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
