"""Export to SkyPilot: a task on machines of any cloud, with torchrun on every node."""

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

# SkyPilot's folder for `workdir`, and an environment that persists between jobs.
_CHECKOUT, _VENV = '"$HOME"/sky_workdir', '"$HOME"/tileforge-venv'


class SkyPilot(Engine):
    """The engine SkyPilot; the payload comes from a checkout if no image is given."""

    start = "sky jobs launch FILE"
    storage = "a bucket (gs://NAME, s3://NAME) or a SkyPilot volume's name"
    storage_pattern = re.compile(
        r"[a-z][a-z0-9]*://[\w.-]+(/[\w./-]*)?|[a-zA-Z0-9][\w.-]*", re.ASCII
    )
    storage_characters = "letters, digits and . - _, and / : in a bucket's address"
    needs_storage = True

    def render(self, job: ExportJob) -> str:
        """Return the text of the task file."""
        resources: dict[str, Value] = {
            "cpus": f"{job.cores_per_node * VCPUS_PER_CORE}+",
            "memory": f"{job.memory_gib_per_node}+",
            "job_recovery": {"max_restarts_on_errors": job.max_restarts},
        }
        task: dict[str, Value] = {
            "name": job.name,
            "num_nodes": job.nodes,
            "resources": resources,
            **_storage(str(job.storage)),
            "envs": dict(job.environment),
        }
        if job.image is None:
            task |= {"workdir": ".", "setup": source_lines(_CHECKOUT, venv=_VENV)}
        else:
            resources["image_id"] = f"docker:{job.image}"
        return render(task | {"run": node_script(job)})


def _storage(name: str) -> dict[str, Value]:
    if "://" in name:
        return {"file_mounts": {MOUNT: {"source": name, "mode": "MOUNT"}}}
    return {"volumes": {MOUNT: name}}


def node_script(job: ExportJob) -> str:
    """Return the shell script that every node executes."""
    script = torchrun_script(
        job,
        folder=MOUNT,
        node_rank='"$SKYPILOT_NODE_RANK"',
        head='"$(head -n 1 <<<"$SKYPILOT_NODE_IPS")"',
    )
    if job.image is not None:
        return script
    return source_environment_lines(_CHECKOUT, venv=_VENV) + script


ENGINE = SkyPilot()
