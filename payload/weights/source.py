"""Resolve the name of a model (`model.init`, `--model`) to the source of its weights."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from payload.core.errors import CheckpointError
from payload.core.printable_text import shown
from payload.core.regular_files import can_see, home_path
from payload.core.suggested_commands import quoted
from payload.formats.checkpoint_listing import (
    MANIFEST_FILE,
    checkpoint_folders,
    manifest_problems,
    newest_valid,
    require_own,
)
from payload.formats.hub_names import (
    HubName,
    hub_name,
    is_ambiguous,
    pinned_name,
    require_one_meaning,
)
from payload.models.gguf import gguf_file, read_gguf
from payload.models.registry import preset_of_hub_name, read_spec, with_file_tensors
from payload.models.spec import ModelSpec
from payload.run_record.run_files import RunPaths
from payload.weights.adapter_files import (
    ADAPTER_CONFIG_FILE,
    has_adapter,
    read_adapter_config,
    recorded_base,
)
from payload.weights.hub import fetch_config, hub_headers, resolve
from payload.weights.run_names import near_names, path_of_run

SCRATCH = "scratch"
BASE_VARIABLE = "TILEFORGE_ADAPTER_BASE"
"""Environment variable with the folder of bases, for adapters of other programs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The source of a model's weights."""

    name: str
    """Name as the user gave it: `scratch`, a path, or a name on the hub, optionally with @REVISION.
    """
    kind: Literal["scratch", "folder", "gguf", "hub"]
    folder: Path | None = None
    """The folder with the weights, which can be a checkpoint; None for the other kinds."""
    file: Path | None = None
    """The GGUF file; None for the other kinds."""

    def spec(self) -> ModelSpec | None:
        """Return the model's spec if it is available without a download, otherwise None.

        Also returns None for `scratch`: the sizes are in the run's config. Raises CheckpointError.
        """
        if self.folder is not None and has_adapter(self.folder):
            setting = f"{self.folder / ADAPTER_CONFIG_FILE}: base_model_name_or_path"
            base = base_name(self.folder)
            return find_source(base, setting=setting, verify=False, takes_ids=False).spec()
        if self.folder is not None:
            return read_spec(self.folder)
        if self.file is not None:
            return read_gguf(self.file)
        return preset_of_hub_name(self.name) if self.kind == "hub" else None


def base_name(adapter: Path) -> str:
    """Return the name of an adapter's base, in the form of `model.init`.

    A manipulated adapter could name any model on this machine as the base. So a base outside of the
    adapter's folder is accepted in only two cases: the adapter records the hash of the base's
    weights (verified when the weights are read), or the user names the folder in the environment.
    Raises CheckpointError.
    """
    source = read_adapter_config(adapter).source()
    if hub_name(source) is not None:
        return source
    path = home_path(source)
    if not can_see(path):
        return source
    if recorded_base(adapter).get("sha256"):
        return str(path.absolute())
    real, named = os.path.realpath(path), os.environ.get(BASE_VARIABLE)
    allowed = [adapter] if not named else [adapter, home_path(named)]
    # The absolute path is returned, because a relative path could have the form of a hub name.
    if any(Path(real).is_relative_to(os.path.realpath(each)) for each in allowed):
        return real
    remote = (
        f" If the hub model {source} is the base, run the command in another folder."
        if is_ambiguous(source)
        else ""
    )
    raise CheckpointError(
        f"{adapter}: its base is {shown(real)} on this machine, but the adapter has no hash of "
        f"the base. If this folder is the right base, set {BASE_VARIABLE}={quoted(real)} in the "
        f"command's environment.{remote}"
    )


def find_source(
    name: str,
    *,
    setting: str,
    verify: bool = True,
    takes_runs: bool = False,
    takes_ids: bool = True,
    passed_over: Callable[[Path, str], None] = lambda _folder, _problem: None,
) -> Source:
    """Resolve `name` to a source; messages call it `setting`.

    With `takes_ids`, a run's id means the run's folder, and `latest` the newest run. `takes_ids` is
    False for the base that an adapter names, because an adapter must not select one of the user's
    runs.

    A folder without config.json can contain one GGUF file instead. A run's folder, or its folder of
    checkpoints, resolves to its newest valid checkpoint; `passed_over` is called with each damaged
    checkpoint and its problem. Checkpoints are verified against their manifests. Without `verify`,
    no weights are read and the newest checkpoint is used. A name with a commit always means a model
    on the hub.

    Raises CheckpointError if there is nothing to load, and for a local folder with a name that
    could also be on the hub. With `takes_runs`, such a folder is accepted if it is a run or a
    checkpoint.
    """
    if name == SCRATCH:
        return Source(name=name, kind="scratch")
    if pinned_name(name) is not None:
        return Source(name=name, kind="hub")
    if takes_ids:
        name = path_of_run(name, setting=setting, error=CheckpointError)
    path = home_path(name)
    if not (takes_runs and (_is_run(path) or (path / MANIFEST_FILE).is_file())):
        require_one_meaning(name, setting=setting, kind="model", error=CheckpointError)
    require_own(path)
    if not _is_run(path) and (file := gguf_file(path)) is not None:
        return Source(name=name, kind="gguf", file=file)
    if not path.is_dir():
        _require_hub_name(name, path, setting=setting)
        return Source(name=name, kind="hub")
    folder = _weights_in(path, name, setting=setting, verify=verify, passed_over=passed_over)
    return Source(name=name, kind="folder", folder=folder)


def pinned_name_of(name: str, *, setting: str, earlier: str | None = None) -> str:
    """Return `name` with its revision resolved to a commit, if `name` is on the hub.

    The id of a run becomes the run's path; another local name or `scratch` is returned unchanged.
    `earlier` is the result of an earlier start of the same run. If `earlier` names the same model,
    its commit is used again, without a request to the hub. Raises CheckpointError.
    """
    requested, before = HubName.parse(name), HubName.parse(earlier or "")
    if earlier == name and (requested is None or requested.commit()):
        return name
    source = find_source(name, setting=setting, verify=False)
    if source.kind != "hub":
        return source.name
    assert requested is not None
    if before is not None and before.commit() and before.name == requested.name:
        return name if requested.commit() else str(before)
    return str(resolve(requested, setting=setting))


def spec_on_hub(name: HubName, *, setting: str) -> ModelSpec:
    """Return the spec of a model on the hub, without a download of its weights.

    Raises CheckpointError.
    """
    spec = read_spec(fetch_config(name, setting=setting))
    if spec.is_counted() and spec.whole is None:
        return spec
    headers = hub_headers(name, setting=setting)
    return with_file_tensors(spec, headers, where=f"{setting} = {name}")


def _weights_in(
    path: Path,
    name: str,
    *,
    setting: str,
    verify: bool,
    passed_over: Callable[[Path, str], None],
) -> Path:
    """Return the folder with the weights: `path`, or the newest checkpoint if `path` is a run."""
    if _is_run(path):
        checkpoints = path if checkpoint_folders(path) else RunPaths(path).checkpoints
        require_own(checkpoints)
        newest = _newest(checkpoints, verify=verify, passed_over=passed_over)
        if newest is None:
            raise CheckpointError(
                f"{setting} = {name!r}: {checkpoints} has no valid checkpoint. Let the run reach "
                "its first checkpoint (train.checkpoint_every), or choose another run."
            )
        return newest
    if verify and (path / MANIFEST_FILE).exists() and (problems := manifest_problems(path)):
        raise CheckpointError(
            f"{setting} = {name!r}: the checkpoint is damaged: {problems[0]} Choose another "
            "checkpoint."
        )
    return path


def _is_run(path: Path) -> bool:
    """Return True if `path` is a run's folder, or its folder of checkpoints."""
    paths = RunPaths(path)
    known = any(each.exists() for each in (paths.config, paths.plan, paths.checkpoints))
    return known or bool(checkpoint_folders(path))


def _newest(
    checkpoints: Path, *, verify: bool, passed_over: Callable[[Path, str], None]
) -> Path | None:
    if verify:
        return newest_valid(checkpoints, passed_over=passed_over)
    complete = [each for each in checkpoint_folders(checkpoints) if (each / MANIFEST_FILE).exists()]
    return complete[-1] if complete else None


def _require_hub_name(name: str, path: Path, *, setting: str) -> None:
    """Raise CheckpointError if `name` is a path, not NAME or OWNER/NAME, optionally @REVISION."""
    if path.exists():
        raise CheckpointError(
            f"{setting} = {name!r}: this is a file, but not a .gguf file. Use the model's folder."
        )
    is_path = name.startswith(("/", "./", "../", "~")) or HubName.parse(name) is None
    # `runs/typo` is a path if the folder `runs` exists.
    if is_path or (len(path.parts) > 1 and Path(path.parts[0]).is_dir()):
        raise CheckpointError(
            f"{setting} = {name!r}: the folder does not exist.{near_names(name)} Correct the path, "
            "or use a run, a checkpoint, a folder in the Hugging Face layout, a GGUF file or a "
            "model on the hub."
        )
