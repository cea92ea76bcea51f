"""Parts that both Kubeflow engines share."""

from __future__ import annotations

import re
from collections.abc import Mapping

from payload.launch.exports.base import MOUNT, VCPUS_PER_CORE, ExportJob
from payload.launch.exports.yaml_text import Value

CLAIM = "tileforge"
"""The persistent volume claim that `--storage` defaults to."""
STORAGE = f"a persistent volume claim that all nodes can mount (default: {CLAIM})"
STORAGE_PATTERN = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
"""Kubernetes requires that the name of a claim is a DNS subdomain (RFC 1123)."""
STORAGE_CHARACTERS = "lower-case letters, digits, . and -"


def bash(script: str) -> list[Value]:
    """Return the command of a container; `$$` keeps Kubernetes from expanding $(NAME)."""
    return ["bash", "-c", re.sub(r"\$(?=[$(])", "$$", script)]


def environment(variables: Mapping[str, str]) -> list[Value]:
    """Return the environment of a container."""
    return [{"name": name, "value": value} for name, value in variables.items()]


def resources(job: ExportJob) -> dict[str, Value]:
    """Return the resource requests of the container on a node."""
    return {
        "requests": {
            "cpu": str(job.cores_per_node * VCPUS_PER_CORE),
            "memory": f"{job.memory_gib_per_node}Gi",
        }
    }


def storage_mounts() -> list[Value]:
    """Return the volume mount of the storage in a container."""
    return [{"name": "storage", "mountPath": MOUNT}]


def storage_volumes(job: ExportJob) -> list[Value]:
    """Return the volumes of a pod."""
    claim: dict[str, Value] = {"claimName": job.storage or CLAIM}
    return [{"name": "storage", "persistentVolumeClaim": claim}]


def deadline(job: ExportJob) -> dict[str, Value]:
    """Return the job's time limit; empty if the run has no limit."""
    return {} if job.max_hours is None else {"activeDeadlineSeconds": int(job.max_hours * 3600)}
