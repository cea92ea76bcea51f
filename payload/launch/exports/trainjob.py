"""Export to Kubeflow Trainer: a TrainJob and its runtime, with torchrun on every node."""

from __future__ import annotations

from payload.launch.exports import kubeflow_common as kubernetes
from payload.launch.exports.base import MOUNT, Engine, ExportJob, torchrun_script
from payload.launch.exports.yaml_text import Value, render

_API = "trainer.kubeflow.org/v1alpha1"
# The operator requires these names: pkg/constants/constants.go of kubeflow/trainer.
_NODE = "node"
_TRAINER_LABEL: dict[str, Value] = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}


class TrainJob(Engine):
    """The engine Kubeflow Trainer, version 2 (API v1alpha1)."""

    start = "kubectl apply -f FILE"
    needs_image = True
    storage = kubernetes.STORAGE
    storage_pattern = kubernetes.STORAGE_PATTERN
    storage_characters = kubernetes.STORAGE_CHARACTERS

    def render(self, job: ExportJob) -> str:
        """Return the TrainJob and its runtime. Volumes and restarts are declared in the runtime."""
        runtime: dict[str, Value] = {
            "apiVersion": _API,
            "kind": "TrainingRuntime",
            "metadata": {"name": job.name, "labels": {"trainer.kubeflow.org/framework": "torch"}},
            "spec": {
                "mlPolicy": {"numNodes": job.nodes, "torch": {}},
                "template": {
                    "spec": {
                        "failurePolicy": {"maxRestarts": job.max_restarts},
                        "replicatedJobs": [_replicated_job(job)],
                    }
                },
            },
        }
        trainer: dict[str, Value] = {
            "numNodes": job.nodes,
            "numProcPerNode": job.ranks_per_node,
            "image": str(job.image),
            "command": kubernetes.bash(node_script(job)),
            "env": kubernetes.environment(job.environment),
            "resourcesPerNode": kubernetes.resources(job),
        }
        reference: dict[str, Value] = {
            "apiGroup": _API.partition("/")[0],
            "kind": "TrainingRuntime",
            "name": job.name,
        }
        train_job: dict[str, Value] = {
            "apiVersion": _API,
            "kind": "TrainJob",
            "metadata": {"name": job.name},
            "spec": {"runtimeRef": reference, "trainer": trainer, **kubernetes.deadline(job)},
        }
        return f"{render(runtime)}---\n{render(train_job)}"


def _replicated_job(job: ExportJob) -> Value:
    """Return the job of all nodes; if one pod fails, all pods end.

    Ranks cannot continue without each other.
    """
    container: dict[str, Value] = {
        "name": _NODE,
        "image": str(job.image),
        "workingDir": MOUNT,
        "volumeMounts": kubernetes.storage_mounts(),
    }
    pod: dict[str, Value] = {
        "restartPolicy": "Never",
        "containers": [container],
        "volumes": kubernetes.storage_volumes(job),
    }
    return {
        "name": _NODE,
        "template": {
            "metadata": {"labels": _TRAINER_LABEL},
            "spec": {"backoffLimit": 0, "template": {"spec": pod}},
        },
    }


def node_script(job: ExportJob) -> str:
    """Return the shell script of the container on each node."""
    return torchrun_script(
        job, folder=MOUNT, node_rank='"$PET_NODE_RANK"', head='"$PET_MASTER_ADDR"'
    )


ENGINE = TrainJob()
