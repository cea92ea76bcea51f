"""Checks a project for `doctor`: enabled APIs, machine types in its zones, GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from payload.core.errors import CloudAuthError, ExitCode, TileforgeError
from payload.core.validation.fields import checked
from payload.machines.gpu_catalog import FP8_CAPABILITY, NVIDIA_DRIVER_BRANCH, SPOT_ALONE, gpus_of
from payload.machines.inventory import Node
from payload.orchestrate.clouds.gcp.check_result import Check, auth, unknown
from payload.orchestrate.clouds.gcp.client import CloudMissingError, Google
from payload.orchestrate.clouds.gcp.compute_resource import get_compute_resource
from payload.orchestrate.hardware.nvidia import GpuNeed, NvidiaFacts, gpu_faults
from payload.stack.cloud_requirements import CloudRequirements


@dataclass(frozen=True, slots=True, kw_only=True)
class _Api:
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Service:
    config: _Api


@dataclass(frozen=True, slots=True, kw_only=True)
class _ServicePage:
    services: tuple[_Service, ...] = ()
    next_page_token: str = checked("", key="nextPageToken")


def check_services(google: Google, need: CloudRequirements) -> Iterator[Check]:
    """Check that every API required by the cluster is enabled."""
    path = f"/v1/projects/{google.project}/services?filter=state:ENABLED&pageSize=200"
    what = "listing enabled APIs"
    try:
        pages = google.get_pages("serviceusage", path, what=what, shape=_ServicePage)
        names = {entry.config.name for page in pages for entry in page.services}
    except CloudAuthError as error:
        if "no quota project" in error.fix:
            yield auth("quota project", error.cause, error.fix)
        else:
            yield unknown("APIs", error)
        return
    except TileforgeError as error:
        yield unknown("APIs", error)
        return
    for service in need.services():
        api = f"{service}.googleapis.com"
        if api in names:
            yield Check(name=api, outcome="ok", found="enabled")
        else:
            fix = f"Enable it: gcloud services enable {api} --project={google.project}"
            yield auth(api, "not enabled", fix)


def check_offers(google: Google, need: CloudRequirements) -> Iterator[Check]:
    """Check that each zone offers the machine type and the disk type."""
    for place, zone in enumerate(need.zones):
        machine = replace(need, zones=(zone,))
        for kind, name, request in (
            ("MachineTypes", need.machine_type, "GetMachineTypeRequest"),
            ("DiskTypes", need.disk_type, "GetDiskTypeRequest"),
        ):
            word = "machine_type" if kind == "MachineTypes" else "disk_type"
            label = f"{name} in {zone}"
            try:
                found = get_compute_resource(
                    google, kind, request, what=label, zone=zone, **{word: name}
                )
            except CloudMissingError:
                # Nodes are built in the first zone; the other zones are alternatives.
                yield Check(
                    name=label,
                    outcome="warning" if place else "error",
                    found="not offered",
                    fix=f"Use another zone of {machine.region}, or another type.",
                    exit_code=ExitCode.CONFIG,
                )
            except TileforgeError as error:
                yield unknown(label, error)
            else:
                size = f", {found.guest_cpus} vCPUs" if kind == "MachineTypes" else ""
                yield Check(name=label, outcome="ok", found=f"offered{size}")


def check_gpus(need: CloudRequirements) -> Iterator[Check]:
    """Report the machine type's GPUs and driver; yield nothing for a type without GPUs."""
    gpus = gpus_of(need.machine_type)
    if gpus is None:
        return
    gpu = gpus.gpu
    capability = ".".join(map(str, gpu.capability))
    fp8 = "with" if gpu.capability >= FP8_CAPABILITY else "without"
    found = (
        f"{gpus.count} x {gpu.name} per node, one rank per GPU: "
        f"{gpu.memory_mib / 1024:.1f} GiB, compute capability {capability} ({fp8} fp8), "
        f"driver branch {NVIDIA_DRIVER_BRANCH}"
    )
    if need.machine_type in SPOT_ALONE and need.spot != "true":
        yield Check(
            name="GPUs",
            outcome="error",
            found=f"{found}; {need.machine_type} is sold only as spot",
            fix="Set spot true (--spot), or use a3-highgpu-8g.",
            exit_code=ExitCode.CONFIG,
        )
    else:
        yield Check(name="GPUs", outcome="ok", found=found)


def check_own_gpus(facts: NvidiaFacts) -> Iterator[Check]:
    """Report this machine's GPUs, for local runs; yield nothing without nvidia-smi."""
    if facts.smi is None:
        return
    node = Node(name="this machine", address="127.0.0.1", physical_cores=1, memory_gib=0.0)
    need = GpuNeed(why="a local run", ranks_per_node=None)
    faults = list(gpu_faults(facts, need=need, node=node))
    yield Check(
        name="GPUs of this machine",
        outcome="warning" if faults else "ok",
        found="; ".join([facts.describe(), *(fault.cause for fault in faults)]),
        fix=" ".join(fault.fix for fault in faults),
    )
