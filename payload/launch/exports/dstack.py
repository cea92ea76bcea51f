"""Export to dstack: a task on cloud or on-premises machines, with torchrun on every node."""

from __future__ import annotations

import re

from payload.launch.exports.base import (
    MOUNT,
    VCPUS_PER_CORE,
    Engine,
    ExportJob,
    source_environment_lines,
    source_lines,
    torchrun_script,
)
from payload.launch.exports.yaml_text import Value, render

_CHECKOUT, _VENV = "/opt/tileforge", "/opt/tileforge-venv"
# Time for which dstack tries to get new machines after an interruption.
_RETRY = "1d"


class Dstack(Engine):
    """The engine dstack; the payload comes from a checkout if no image is given."""

    start = "dstack apply -f FILE"
    storage = "a volume's name, or a folder (/PATH) that all machines share"
    # The pattern of dstack's validate_dstack_resource_name.
    storage_pattern = re.compile(r"[a-z][a-z0-9-]{1,40}|/[\w./-]*", re.ASCII)
    storage_characters = "lower-case letters, digits and -, and in a folder also A-Z . / _"
    needs_storage = True

    def render(self, job: ExportJob) -> str:
        """Return the text of the task file."""
        task: dict[str, Value] = {"type": "task", "name": job.name, "nodes": job.nodes}
        if job.image is None:
            task |= {"python": "3.11", "repos": [f".:{_CHECKOUT}"]}
        else:
            task |= {"image": job.image, "shell": "bash"}
        resources: dict[str, Value] = {
            "cpu": f"{job.cores_per_node * VCPUS_PER_CORE}..",
            "memory": f"{job.memory_gib_per_node}GB..",
        }
        retry: dict[str, Value] = {
            "on_events": ["no-capacity", "interruption", "error"],
            "duration": _RETRY,
        }
        limit = {} if job.max_hours is None else {"max_duration": f"{job.max_hours * 3600:.0f}s"}
        task |= {
            "env": dict(job.environment),
            "volumes": [f"{_storage(job)}:{MOUNT}"],
            "resources": resources,
            "retry": retry,
            **limit,
            "commands": [node_script(job)],
        }
        return render(task)


def _storage(job: ExportJob) -> str:
    """Return the name of the volume; each node has a separate network volume.

    A network volume can be mounted on only one machine. The run's files are on the volume of the
    first node. Every volume needs the data.
    """
    name = str(job.storage)
    return name if name.startswith("/") or job.nodes == 1 else f"{name}-${{{{ dstack.node_rank }}}}"


def node_script(job: ExportJob) -> str:
    """Return the shell script that every node executes."""
    script = torchrun_script(
        job, folder=MOUNT, node_rank='"$DSTACK_NODE_RANK"', head='"$DSTACK_MASTER_NODE_IP"'
    )
    if job.image is not None:
        return script
    return (
        source_lines(_CHECKOUT, venv=_VENV)
        + source_environment_lines(_CHECKOUT, venv=_VENV)
        + script
    )


ENGINE = Dstack()
