"""A cluster over SSH: what planning learns or assumes of it, and what its nodes lack."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from rich.console import Console

from payload.config.run_config import RunConfig
from payload.config.store_address import StoreAddress
from payload.config.training_sections import DtypeChoice
from payload.core.dtype import Dtype
from payload.core.errors import ConfigError, PreflightError
from payload.core.untrusted import open_regular, shown
from payload.formats.checkpoint_files import MANIFEST_FILE, load_manifest
from payload.formats.data_folder import META_NAME, load_meta
from payload.formats.hf_folder import (
    CONFIG_FILE,
    INDEX_FILE,
    TOKENIZER_FILES,
    has_shards,
    own_file,
    weight_files,
)
from payload.launch.launchers.base import Launcher, Reach
from payload.launch.launchers.registry import AUTO
from payload.launch.plan import rank_program
from payload.machines.core_speed import typical_core_flops_per_s
from payload.machines.inventory import RANK_PORTS, ClusterInventory, Node
from payload.orchestrate.nvidia import gpu_need
from payload.orchestrate.planning import PlannedRun, plan_run
from payload.orchestrate.preflight.trial_findings import Measured, Record, known_trial
from payload.orchestrate.run.console import duration
from payload.orchestrate.sites.choose import Chosen, require_launcher
from payload.orchestrate.sites.local import LOOPBACK
from payload.orchestrate.ssh.connection import Cluster, Connection
from payload.orchestrate.ssh.files import (
    Code,
    build_kernels,
    look,
    send_code,
    send_files,
    this_code,
)
from payload.orchestrate.ssh.streams import NODE_FOLDER, NodeLook, all_or_raise, on_every_node
from payload.run_record.results import RunPaths
from payload.storage.here import TRY_STORE_S, check_words, require_stored
from payload.weights.source import find_source


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A folder in the Hugging Face layout on this machine, or one with a GGUF file."""

    folder: Path
    files: Mapping[str, str]
    """sha256 by name, of what a model is loaded from; config.json or the GGUF file is the last."""

    @property
    def digest(self) -> str:
        """Names the weights: equal for equal files."""
        return hashlib.sha256(json.dumps(self.files, sort_keys=True).encode()).hexdigest()[:16]

    def size_bytes(self) -> int:
        """Return the size of all files together."""
        return sum((self.folder / name).stat().st_size for name in self.files)


def local_weights(init: str) -> Weights | None:
    """Return the weights of `model.init` here; None for `scratch` and for names on a hub.

    A run's folder stands for its newest checkpoint. Raises ConfigError when something lacks, or is
    not what a checkpoint's manifest says.
    """
    # Not verified here: every file that is sent is compared with the manifest below.
    source = find_source(init, setting="model.init", verify=False)
    if (file := source.file) is not None:
        return Weights(folder=file.parent, files={file.name: _sha256(file, init=init)})
    folder = source.folder
    if folder is None:
        return None
    promised = _promised(folder)
    files = {}
    for name in (*_files(folder), CONFIG_FILE):
        files[name] = _sha256(own_file(folder, name), init=init)
        if promised is not None and files[name] != promised.get(name):
            raise ConfigError(
                f"model.init = {init!r}: {folder / name} is not what the checkpoint's manifest "
                "says. It is damaged; name another checkpoint."
            )
    return Weights(folder=folder, files=files)


def _files(folder: Path) -> list[str]:
    """Return the names of the weights' and the tokenizer's files."""
    index = [INDEX_FILE] if has_shards(folder) else []
    tokenizer = (name for name in TOKENIZER_FILES if (folder / name).is_file())
    return [*weight_files(folder), *index, *tokenizer]


def _promised(folder: Path) -> dict[str, str] | None:
    """Return the hashes in a checkpoint's manifest, by file; None for a folder that has none."""
    if not (folder / MANIFEST_FILE).exists():
        return None
    return {name: entry.sha256 for name, entry in load_manifest(folder).files.items()}


def _sha256(path: Path, *, init: str) -> str:
    try:
        with open_regular(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(
            f"model.init = {init!r}: {path}: {error.strerror}. Name a folder in the Hugging Face "
            "layout, with safetensors, or a checkpoint."
        ) from None


VENV = PurePosixPath("/opt/tileforge/venv")
"""The nodes' environment, which their bootstrap makes."""

ASSUMED_LINK_BYTES_PER_S = 1.25e9
"""A guess, 10 Gbit/s, for networks that were not measured."""


def programs_of(launcher: Launcher) -> list[str]:
    """Return the programs that a run needs in the nodes' environment."""
    return ["python", *([launcher.program] if launcher.program else [])]


def venv_executable(launcher: Launcher) -> str:
    """Return the launcher's path on every node."""
    return str(VENV / "bin" / (launcher.program or "python"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterAccess:
    """Answers for the whole cluster."""

    interface_of: Mapping[str, str | None]
    """By node: towards the head; the head's towards the first worker."""
    memory_bytes: int | None
    """Memory of the node with the least."""
    head: str
    """The head's name."""
    code: PurePosixPath
    """The folder with the payload package in it."""
    ssh_config: PurePosixPath
    """On the head, with the run's key."""
    tcmalloc_library: str | None
    python: str = str(VENV / "bin" / "python")
    measured: Measured | None = None
    """By the newest trial of these nodes."""
    has_bf16: bool | None = None
    """True if every node's CPU multiplies bf16 itself; None where that is not known."""
    launcher: str = AUTO

    @property
    def link_bytes_per_s(self) -> float:
        """Return the measured bandwidth, else a guess."""
        known = self.measured.link_bytes_per_s() if self.measured else None
        return known or ASSUMED_LINK_BYTES_PER_S

    def peak_flops_per_s(self, choice: DtypeChoice) -> float | None:
        """Return the measured rate."""
        return self.measured.peak_flops_per_s(choice) if self.measured else None

    def dtype(self, choice: DtypeChoice) -> Dtype:
        """Return the dtype by the nodes' measured speeds, else by their CPUs, else bf16."""
        if choice != "auto":
            return choice
        if self.measured is not None:
            return self.measured.dtype(choice)
        return "fp32" if self.has_bf16 is False else "bf16"

    def core_flops_per_s(self, dtype: Dtype) -> float:
        """Return the peak of a typical core, with bf16 emulated where a node's CPU lacks it."""
        return typical_core_flops_per_s(dtype, emulates_bf16=self.has_bf16 is False)

    def interfaces(self, nodes: Sequence[Node]) -> Mapping[str, str]:
        """Return each node's interface on the way to the head; the head's to the first worker."""
        return {node.name: self.interface_of[node.name] or LOOPBACK for node in nodes}

    def program(self, paths: RunPaths) -> tuple[str, ...]:
        """Return the trainer."""
        return rank_program(python=self.python, run_dir=paths.root)

    def executable(self, launcher: Launcher) -> str:
        """Return the one of the nodes' environment."""
        return venv_executable(launcher)

    def reach(self) -> Reach:
        """Return ssh with the run's key; for one node alone, no ssh."""
        if len(self.interface_of) == 1:
            return Reach(interface=LOOPBACK)
        interface = self.interface_of[self.head]
        if interface is None:
            raise PreflightError(
                f"{self.head}: its network interface towards the other nodes is not known. See "
                "that `ip route get` works there (iproute2)."
            )
        return Reach(interface=interface, ssh=("-F", str(self.ssh_config)))

    def python_path(self) -> str | None:
        """Return the copy of this machine's payload, in front of what is installed."""
        return str(self.code)

    def tcmalloc(self) -> str:
        """Return the library, which every node must have."""
        if self.tcmalloc_library is None:
            raise PreflightError(
                "launch.malloc = 'tcmalloc', but not every node has libtcmalloc. Install it there: "
                "sudo apt-get install libtcmalloc-minimal4 (or use launch.malloc = 'tuned')."
            )
        return self.tcmalloc_library

    def free_memory_bytes(self) -> int | None:
        """Return the memory of the node with the least; a node has nothing else to do."""
        return self.memory_bytes


Answers = Mapping[str, NodeLook]
"""By node."""


def ask_nodes(
    inventory: ClusterInventory,
    cluster: Cluster,
    *,
    code: Code,
    programs: Sequence[str],
    data: Path,
    weights: Weights | None,
) -> Answers:
    """Return what every node has and lacks. Raises PreflightError where a run cannot be.

    `programs` are those that the run needs in the nodes' environment.
    """
    wholes = [_whole_data(data), *([_whole_weights(weights)] if weights else [])]
    answers = all_or_raise(
        on_every_node(
            inventory.nodes,
            lambda node: look(
                cluster.connect(node), code, venv=VENV, programs=programs, wholes=wholes
            ),
        ),
        what="looking at the nodes",
    )
    homes = {name: answer.home for name, answer in answers.items()}
    if len(set(homes.values())) > 1:
        listed = ", ".join(f"{name} {home}" for name, home in homes.items())
        raise PreflightError(
            f"the login's home is not the same on every node ({listed}); every rank starts "
            "with the same paths. Give the user the same home everywhere."
        )
    for name, answer in answers.items():
        if answer.lacking:
            raise PreflightError(
                f"{name}: it has no {shown(', '.join(answer.lacking))}. Run its bootstrap again "
                "(bootstrap/node-setup.sh)."
            )
    return answers


def bring_code(
    inventory: ClusterInventory, cluster: Cluster, answers: Answers, *, code: Code, talk: Console
) -> None:
    """Bring the code to nodes that lack it and compile it there; a failed build is a note."""
    lacking = {name: a.missing for name, a in answers.items() if a.missing is not None}
    nodes = [node for node in inventory.nodes if node.name in lacking]
    if not nodes:
        return
    counts = ", ".join(f"{name} {len(missing)}" for name, missing in lacking.items())
    talk.print(f"payload {code.digest}: sending changed files ({counts})")

    def send(node: Node) -> str | None:
        connection, home = cluster.connect(node), _home(answers, node)
        send_code(connection, code, lacking[node.name], home=home)
        return build_kernels(connection, code, home=home, venv=VENV)

    reasons = all_or_raise(on_every_node(nodes, send), what="sending the payload")
    built = ", ".join(name for name, reason in reasons.items() if reason is None)
    if built:
        talk.print(f"kernels: built on {built}")
    for name, reason in reasons.items():
        if reason is not None:
            talk.print(f"note: {name} trains without kernels: {reason}")


def try_store(
    address: StoreAddress,
    head: Connection,
    answer: NodeLook,
    *,
    code: Code,
    new_run: str | None = None,
) -> None:
    """Raise ConfigError or PreflightError where the head, which has the code, cannot write there.

    The same holds for `new_run`, a run's id, that the store has already.
    """
    root = PurePosixPath(answer.home, NODE_FOLDER, f"payload-{code.digest}")
    program = check_words(address, new_run=new_run, python=str(VENV / "bin" / "python"))
    done = head.run(["env", f"PYTHONPATH={root}", *program], timeout_s=TRY_STORE_S)
    require_stored(done.status, done.stderr, where=f"{head.node.name}: ")


def bring_data(
    inventory: ClusterInventory,
    cluster: Cluster,
    answers: Answers,
    *,
    source: Path,
    talk: Console,
) -> PurePosixPath:
    """Bring the data to the nodes that lack it, each from here; return where it is."""
    whole = _whole_data(source)
    target = _home(answers, inventory.head) / NODE_FOLDER / PurePosixPath(whole).parent
    known = load_meta(source).all_files()
    files = {**{name: entry.sha256 for name, entry in known.items()}, META_NAME: None}
    nodes = [node for node in inventory.nodes if whole not in answers[node.name].has]
    if nodes:
        size = sum(path.stat().st_size for path in source.iterdir()) / 1e6
        names = ", ".join(node.name for node in nodes)
        talk.print(f"data {source}: sending {size:,.0f} MB to each of {names}")
    all_or_raise(
        on_every_node(nodes, lambda node: send_files(cluster.connect(node), source, target, files)),
        what="sending the data",
    )
    return target


def bring_weights(
    inventory: ClusterInventory,
    cluster: Cluster,
    answers: Answers,
    *,
    weights: Weights,
    talk: Console,
) -> PurePosixPath:
    """Bring the weights to the head, if it lacks them; return where. Rank 0 alone reads them."""
    head = inventory.head
    whole = _whole_weights(weights)
    target = _home(answers, head) / NODE_FOLDER / PurePosixPath(whole).parent
    if whole not in answers[head.name].has:
        size = weights.size_bytes() / 1e6
        talk.print(f"weights {weights.folder}: sending {size:,.0f} MB to {head.name}")
        send_files(cluster.connect(head), weights.folder, target, weights.files)
    return target


def _whole_data(source: Path) -> str:
    """Return the file that a node with this data has under ~/tileforge: equal for equal data."""
    digest = hashlib.sha256((source / META_NAME).read_bytes()).hexdigest()[:16]
    return f"data/{digest}/{META_NAME}"


def _whole_weights(weights: Weights) -> str:
    return f"weights/{weights.digest}/{list(weights.files)[-1]}"


def _home(answers: Answers, node: Node) -> PurePosixPath:
    return PurePosixPath(answers[node.name].home)


_PORT = RANK_PORTS.start  # the first of those that `run` chooses from
_INTERFACE = "ens4"  # Compute Engine's


def plan_dry_run(
    run_id: str,
    config: RunConfig,
    chosen: Chosen,
    *,
    vocab_size: int | None,
    root: Path,
    now_unix: float,
) -> PlannedRun:
    """Plan the run as it would be on the cluster; its newest trial is below `root`.

    Raises ConfigError.
    """
    inventory = chosen.inventory
    require_launcher(config, inventory)
    home = default_home(inventory)
    on_gpus = gpu_need(config, inventory.nodes) is not None
    record = known_trial(inventory.cluster, inventory.nodes, root, on_gpus=on_gpus)
    planned = plan_run(
        RunPaths(Path(home / NODE_FOLDER / "runs" / run_id)),
        config=config,
        chosen=chosen,
        access=dry_run_access(inventory, record, run_id=run_id),
        vocab_size=vocab_size,
        work_dir=Path(home),
        port=_PORT,
    )
    notes = dry_run_notes(inventory, record, now_unix=now_unix)
    return replace(planned, plan=replace(planned.plan, notes=(*planned.plan.notes, *notes)))


def default_home(inventory: ClusterInventory) -> PurePosixPath:
    """Return the login's home on Linux."""
    user = inventory.ssh_user
    return PurePosixPath("/root") if user == "root" else PurePosixPath("/home", user)


def dry_run_access(
    inventory: ClusterInventory, record: Record | None, *, run_id: str
) -> ClusterAccess:
    """Return the cluster as its inventory and its newest trial show it."""
    home = default_home(inventory)
    interfaces = record.interfaces if record else {}
    alone = len(inventory.nodes) == 1
    return ClusterAccess(
        interface_of={
            node.name: interfaces.get(node.name, None if alone else _INTERFACE)
            for node in inventory.nodes
        },
        memory_bytes=int(min(node.memory_gib for node in inventory.nodes) * 2**30),
        head=inventory.head.name,
        code=home / NODE_FOLDER / f"payload-{this_code().digest}",
        ssh_config=home / ".ssh" / "tileforge" / run_id / "ssh_config",
        tcmalloc_library="libtcmalloc_minimal.so.4",
        measured=record.measured if record else None,
    )


def dry_run_notes(
    inventory: ClusterInventory, record: Record | None, *, now_unix: float
) -> tuple[str, ...]:
    """Return the assumptions in words."""
    asked = "no node was asked: "
    guesses = [f"home {default_home(inventory)}", f"port {_PORT}"]
    if record is None:
        if len(inventory.nodes) > 1:
            speed = ASSUMED_LINK_BYTES_PER_S * 8 / 1e9
            guesses += [f"interface {_INTERFACE}", f"a network of {speed:g} Gbit/s"]
        guesses.append("the cores 0 to n-1 of each node")
        return (f"{asked}{', '.join(guesses)} are assumed; preflight measures network and cores",)
    guesses.append("the cores 0 to n-1 of each node")
    age = duration(now_unix - record.time_unix)
    return (
        f"{asked}{', '.join(guesses)} are assumed",
        f"interfaces, network and matmul speed are those of the trial {age} ago (preflight)",
    )
