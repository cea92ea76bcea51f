"""Export to Kubeflow's MPI Operator: Intel MPI starts the ranks on workers that run sshd.

The operator (its pkg/controller/mpi_job_controller.go, v0.8.2) gives the launcher's pod the hosts
file /etc/mpi/hostfile, with HOST:SLOTS on each line. Every pod gets the key pair of the job from
the secret NAME-ssh, in files that all users can read, but no host keys. Therefore sshd on the
workers uses that key as its host key, and the launcher accepts no other key. Only a pod that has
the secret is a node of the job.
"""

from __future__ import annotations

import shlex

from payload.launch.exports import kubeflow_common as kubernetes
from payload.launch.exports.base import MASTER_PORT, MOUNT, Engine, ExportJob
from payload.launch.exports.yaml_text import Value, render

_SSH = "/etc/mpijob-ssh"
_KEY = "/tmp/id_rsa"
# ssh and sshd refuse a private key that other users can read.
_OWN_KEY = f"install -m 600 {_SSH}/id_rsa {_KEY}\n"
_HOSTS = "/etc/mpi/hostfile"
_KNOWN_HOSTS = "/tmp/known_hosts"
# DNS resolves the names of pods only some seconds after the pods are ready.
_RESOLVE_S = 120


class MpiJob(Engine):
    """The engine MPI Operator, version 2 (API v2beta1)."""

    start = "kubectl apply -f FILE"
    needs_image = True
    storage = kubernetes.STORAGE
    storage_pattern = kubernetes.STORAGE_PATTERN
    storage_characters = kubernetes.STORAGE_CHARACTERS

    def render(self, job: ExportJob) -> str:
        """Return the text of the MPIJob."""
        run_policy: dict[str, Value] = {
            "cleanPodPolicy": "Running",
            "backoffLimit": job.max_restarts,
            **kubernetes.deadline(job),
        }
        return render(
            {
                "apiVersion": "kubeflow.org/v2beta1",
                "kind": "MPIJob",
                "metadata": {"name": job.name},
                "spec": {
                    "mpiImplementation": "Intel",
                    "slotsPerWorker": job.ranks_per_node,
                    "sshAuthMountPath": _SSH,
                    "launcherCreationPolicy": "WaitForWorkersReady",
                    "runPolicy": run_policy,
                    "mpiReplicaSpecs": {
                        "Launcher": {
                            "replicas": 1,
                            "restartPolicy": "OnFailure",
                            "template": _template(job, _launcher(job)),
                        },
                        "Worker": {
                            "replicas": job.nodes,
                            "restartPolicy": "OnFailure",
                            "template": _template(job, _worker(job)),
                        },
                    },
                },
            }
        )


def _template(job: ExportJob, container: dict[str, Value]) -> Value:
    shared: dict[str, Value] = {"image": str(job.image), "workingDir": MOUNT}
    mounts = {"volumeMounts": kubernetes.storage_mounts()}
    return {
        "spec": {
            "containers": [{**container, **shared, **mounts}],
            "volumes": kubernetes.storage_volumes(job),
        }
    }


def _launcher(job: ExportJob) -> dict[str, Value]:
    return {"name": "launcher", "command": kubernetes.bash(launcher_script(job))}


def _worker(job: ExportJob) -> dict[str, Value]:
    script = (
        f"{_OWN_KEY}mkdir -p /run/sshd\n"
        f"exec /usr/sbin/sshd -De -o HostKey={_KEY} -o StrictModes=no "
        f"-o AuthorizedKeysFile={_SSH}/authorized_keys -o PasswordAuthentication=no\n"
    )
    return {
        "name": "worker",
        "command": kubernetes.bash(script),
        "readinessProbe": {"tcpSocket": {"port": 22}, "periodSeconds": 2},
        "resources": kubernetes.resources(job),
    }


def launcher_script(job: ExportJob) -> str:
    """Return the shell script of the launcher's pod."""
    ssh = (
        "-o ConnectionAttempts=10 -o BatchMode=yes -o StrictHostKeyChecking=yes "
        f"-o UserKnownHostsFile={_KNOWN_HOSTS} -i {_KEY}"
    )
    variables = "".join(
        f"  -genv {name} {value} \\\n"
        for name, value in {
            **{name: shlex.quote(value) for name, value in job.environment.items()},
            "MASTER_ADDR": '"$head"',
            "MASTER_PORT": str(MASTER_PORT),
        }.items()
    )
    return (
        f"set -euo pipefail\ncd {MOUNT}\n"
        f"mkdir -p {job.run_dir}\n"
        f"{job.config_lines(f'{job.run_dir}/run.toml')}"
        f"{_OWN_KEY}"
        f"printf '* %s\\n' \"$(cut -d ' ' -f 1,2 {_SSH}/id_rsa.pub)\" >{_KNOWN_HOSTS}\n"
        f"for host in $(cut -d : -f 1 {_HOSTS}); do\n"
        f'  timeout {_RESOLVE_S} bash -c \'until getent hosts "$0"; do sleep 1; done\' "$host"\n'
        "done\n"
        f"head=$(head -n 1 {_HOSTS} | cut -d : -f 1)\n"
        f'export I_MPI_HYDRA_BOOTSTRAP=ssh I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS="{ssh}"\n'
        "I_MPI_HYDRA_IFACE=$(python3 -P -c 'import sys; from payload.train.ranks.interface import "
        'interface_towards; print(interface_towards(sys.argv[1]) or "eth0")\' "$head")\n'
        "export I_MPI_HYDRA_IFACE I_MPI_PIN=off\n"
        "# A run folder with a checkpoint in it is resumed.\n"
        f"exec mpirun -noconf -f {_HOSTS} -n {job.world_size} -ppn {job.ranks_per_node} \\\n"
        f"{variables}"
        f'  "$(command -v python3)" -m payload.train --config {job.run_dir}/run.toml '
        f"--run-dir {job.run_dir}\n"
    )


ENGINE = MpiJob()
