"""Uploads code, data and weights to nodes that lack them, and tests the nodes' store access."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rich.console import Console

from payload.config.store_address import StoreAddress
from payload.core.errors import ConfigError, PreflightError
from payload.core.file_hash import sha256_of
from payload.core.printable_text import shown
from payload.formats.checkpoint_listing import MANIFEST_FILE, load_manifest
from payload.formats.data_folder import META_NAME, load_meta
from payload.formats.hf_folder import (
    CONFIG_FILE,
    INDEX_FILE,
    PROCESSOR_FILES,
    TOKENIZER_FILES,
    has_shards,
    own_file,
    weight_files,
)
from payload.machines.inventory import Node
from payload.orchestrate.machine_profiles.cluster_profile import Answers
from payload.orchestrate.ssh.cluster import Cluster
from payload.orchestrate.ssh.connection import Connection
from payload.orchestrate.ssh.files import send_files
from payload.orchestrate.ssh.node_code import Code, build_kernels, inspect_node, send_code
from payload.orchestrate.ssh.remote_calls import NODE_FOLDER, NodeState, all_or_raise, on_every_node
from payload.orchestrate.terminal.narrow import print_message
from payload.stack.node_paths import VENV
from payload.storage.store_access import TRY_STORE_S, check_command, require_store_ok
from payload.weights.source import find_source


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A local folder of weights in the Hugging Face layout, or with a GGUF file."""

    folder: Path
    files: Mapping[str, str]
    """SHA-256 of each model file by name; config.json or the GGUF file is the last."""

    @property
    def digest(self) -> str:
        """A name for these weights. Identical files have the same name."""
        return hashlib.sha256(json.dumps(self.files, sort_keys=True).encode()).hexdigest()[:16]

    def size_bytes(self) -> int:
        """Return the total size of the files."""
        return sum((self.folder / name).stat().st_size for name in self.files)


def local_weights(init: str) -> Weights | None:
    """Return the local weights of `model.init`; None for `scratch` and for names on a hub.

    If `init` is a run's folder, its newest checkpoint is used. Raises ConfigError if a file is
    missing or does not match the checkpoint's manifest.
    """
    # verify=False, because every uploaded file is compared with the manifest below.
    source = find_source(init, setting="model.init", verify=False)
    if (file := source.file) is not None:
        return Weights(folder=file.parent, files={file.name: _sha256(file, init=init)})
    folder = source.folder
    if folder is None:
        return None
    expected = _manifest_hashes(folder)
    files = {}
    for name in (*_files(folder), CONFIG_FILE):
        files[name] = _sha256(own_file(folder, name), init=init)
        if expected is not None and files[name] != expected.get(name):
            raise ConfigError(
                f"model.init = {init!r}: {folder / name} is damaged, because it does not match the "
                "checkpoint's manifest. Use another checkpoint."
            )
    return Weights(folder=folder, files=files)


def _files(folder: Path) -> list[str]:
    """Return the names of the files with the weights, the tokenizer and the processor."""
    index = [INDEX_FILE] if has_shards(folder) else []
    others = (*TOKENIZER_FILES, *PROCESSOR_FILES)
    return [*weight_files(folder), *index, *(each for each in others if (folder / each).is_file())]


def _manifest_hashes(folder: Path) -> dict[str, str] | None:
    """Return the hashes in a checkpoint's manifest by file; None if there is no manifest."""
    if not (folder / MANIFEST_FILE).exists():
        return None
    return {name: entry.sha256 for name, entry in load_manifest(folder).files.items()}


def _sha256(path: Path, *, init: str) -> str:
    try:
        return sha256_of(path)
    except OSError as error:
        raise ConfigError(
            f"model.init = {init!r}: {path}: {error.strerror}. Use a folder in the Hugging Face "
            "layout, with safetensors, or a checkpoint."
        ) from None


def upload_code(
    nodes: Sequence[Node], cluster: Cluster, answers: Answers, *, code: Code, talk: Console
) -> None:
    """Upload the code to nodes that lack it and build the kernels; report a failed build."""
    lacking = {name: a.missing for name, a in answers.items() if a.missing is not None}
    behind = [node for node in nodes if node.name in lacking]
    if not behind:
        return
    counts = ", ".join(f"{name} {len(missing)}" for name, missing in lacking.items())
    talk.print(f"payload {code.digest}: sending changed files ({counts})")

    def send(node: Node) -> str | None:
        connection, home = cluster.connect(node), _home(answers, node)
        send_code(connection, code, lacking[node.name], home=home)
        return build_kernels(connection, code, home=home, venv=VENV)

    reasons = all_or_raise(on_every_node(behind, send), what="sending the payload")
    built = ", ".join(name for name, reason in reasons.items() if reason is None)
    if built:
        talk.print(f"kernels: built on {built}")
    for name, reason in reasons.items():
        if reason is not None:
            print_message(talk, f"note: {name} trains without kernels: {reason}")


def try_store(
    address: StoreAddress,
    head: Connection,
    answer: NodeState,
    *,
    code: Code,
    new_run: str | None = None,
) -> None:
    """Test the store from the head, which must have the code.

    Raises ConfigError or PreflightError if the head cannot write to the store, or if the store
    already has the run `new_run`.
    """
    root = PurePosixPath(answer.home, NODE_FOLDER, f"payload-{code.digest}")
    program = check_command(address, new_run=new_run, python=str(VENV / "bin" / "python"))
    done = head.run(["env", f"PYTHONPATH={root}", *program], timeout_s=TRY_STORE_S)
    require_store_ok(done.status, done.stderr, where=f"{head.node.name}: ")


def upload_data(
    nodes: Sequence[Node],
    cluster: Cluster,
    answers: Answers,
    *,
    source: Path,
    talk: Console,
) -> PurePosixPath:
    """Upload the local data to nodes that lack it; return the folder of the data on the nodes."""
    whole = _whole_data(source)
    target = _home(answers, nodes[0]) / NODE_FOLDER / PurePosixPath(whole).parent
    known = load_meta(source).all_files()
    files = {**{name: entry.sha256 for name, entry in known.items()}, META_NAME: None}
    lacking = [node for node in nodes if whole not in answers[node.name].has]
    if lacking:
        size = sum(path.stat().st_size for path in source.iterdir()) / 1e6
        names = ", ".join(node.name for node in lacking)
        talk.print(f"data {source}: sending {size:,.0f} MB to each of {names}")
    all_or_raise(
        on_every_node(
            lacking, lambda node: send_files(cluster.connect(node), source, target, files)
        ),
        what="sending the data",
    )
    return target


def upload_weights(
    head: Node,
    cluster: Cluster,
    answers: Answers,
    *,
    weights: Weights,
    talk: Console,
) -> PurePosixPath:
    """Upload the weights to the head if it lacks them; return the folder on the head.

    Only rank 0 reads the weights, and rank 0 runs on the head.
    """
    whole = _whole_weights(weights)
    target = _home(answers, head) / NODE_FOLDER / PurePosixPath(whole).parent
    if whole not in answers[head.name].has:
        size = weights.size_bytes() / 1e6
        talk.print(f"weights {weights.folder}: sending {size:,.0f} MB to {head.name}")
        send_files(cluster.connect(head), weights.folder, target, weights.files)
    return target


def _whole_data(source: Path) -> str:
    """Return the data's path under ~/tileforge; if this path exists, the data is complete."""
    digest = hashlib.sha256((source / META_NAME).read_bytes()).hexdigest()[:16]
    return f"data/{digest}/{META_NAME}"


def _whole_weights(weights: Weights) -> str:
    return f"weights/{weights.digest}/{list(weights.files)[-1]}"


def _home(answers: Answers, node: Node) -> PurePosixPath:
    return PurePosixPath(answers[node.name].home)


def inspect_nodes(
    nodes: Sequence[Node],
    cluster: Cluster,
    *,
    code: Code,
    programs: Sequence[str],
    data: Path,
    weights: Weights | None,
) -> Answers:
    """Return the state of every node. Raises PreflightError if a node cannot take part in a run.

    Every node's virtual environment must contain `programs`.
    """
    wholes = [_whole_data(data), *([_whole_weights(weights)] if weights else [])]
    answers = all_or_raise(
        on_every_node(
            nodes,
            lambda node: inspect_node(
                cluster.connect(node), code, venv=VENV, programs=programs, wholes=wholes
            ),
        ),
        what="inspecting the nodes",
    )
    homes = {name: answer.home for name, answer in answers.items()}
    if len(set(homes.values())) > 1:
        listed = ", ".join(f"{name} {home}" for name, home in homes.items())
        raise PreflightError(
            f"the login's home differs between nodes ({listed}), but all ranks use the same paths. "
            "Give the user the same home on every node."
        )
    for name, answer in answers.items():
        if answer.lacking:
            raise PreflightError(
                f"{name}: missing {shown(', '.join(answer.lacking))}. Run its bootstrap again "
                "(bootstrap/node-setup.sh)."
            )
    return answers
