"""The one place that says what the name of a model stands for: `model.init`, `--checkpoint`."""

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
    newest_sound,
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
from payload.models.registry import preset_of_hub_name, read_spec
from payload.models.spec import ModelSpec
from payload.run_record.run_files import RunPaths
from payload.weights.adapter_files import (
    ADAPTER_CONFIG_FILE,
    has_adapter,
    read_adapter_config,
    recorded_base,
)
from payload.weights.hub import fetch_config, resolve, weight_shapes

SCRATCH = "scratch"
BASE_VARIABLE = "TILEFORGE_ADAPTER_BASE"
"""Names the folder with bases of adapters that other programs made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The place that a model's weights come from."""

    name: str
    """As it was given: `scratch`, a path, or a name on the hub, perhaps with @REVISION."""
    kind: Literal["scratch", "folder", "gguf", "hub"]
    folder: Path | None = None
    """The folder with the weights, of a checkpoint too; None for the other kinds."""
    file: Path | None = None
    """The GGUF file; None for the other kinds."""

    def spec(self) -> ModelSpec | None:
        """Return the model's numbers where they are known without a download, else None.

        None as well for `scratch`, whose numbers are the run config's. Raises CheckpointError.
        """
        if self.folder is not None and has_adapter(self.folder):
            setting = f"{self.folder / ADAPTER_CONFIG_FILE}: base_model_name_or_path"
            return find_source(base_name(self.folder), setting=setting, verify=False).spec()
        if self.folder is not None:
            return read_spec(self.folder)
        if self.file is not None:
            return read_gguf(self.file)
        return preset_of_hub_name(self.name) if self.kind == "hub" else None


def base_name(adapter: Path) -> str:
    """Return the name of an adapter's base, as `model.init` has it.

    Whoever made an adapter could have any model of this machine exported, trained from or sent. A
    folder outside of the adapter's is its base only where the adapter has the hash of the base's
    weights, which is compared when they are read and which nobody knows without them, or where a
    person names it in the environment. Raises CheckpointError.
    """
    source = read_adapter_config(adapter).source()
    if hub_name(source) is not None:
        return source
    place = home_path(source)
    if not can_see(place):
        return source
    if recorded_base(adapter).get("sha256"):
        return str(place.absolute())
    real, named = os.path.realpath(place), os.environ.get(BASE_VARIABLE)
    allowed = [adapter] if not named else [adapter, home_path(named)]
    # Whole: the name of a folder that is allowed may have the form of a hub's.
    if any(Path(real).is_relative_to(os.path.realpath(each)) for each in allowed):
        return real
    remote = (
        f" If the hub model {source} is the base, run the command in another folder."
        if is_ambiguous(source)
        else ""
    )
    raise CheckpointError(
        f"{adapter}: its base is {shown(real)} on this machine. The adapter does not prove which "
        f"base it was trained on. If this is the base, set {BASE_VARIABLE}={quoted(real)} before "
        f"the command.{remote}"
    )


def find_source(
    name: str,
    *,
    setting: str,
    verify: bool = True,
    takes_runs: bool = False,
    passed_over: Callable[[Path, str], None] = lambda _folder, _problem: None,
) -> Source:
    """Return the source that `name` stands for; `setting` is what messages call it.

    A folder without config.json may have one GGUF file instead. A run's folder, or its folder of
    checkpoints, stands for its newest sound checkpoint: `passed_over` is told of each damaged one
    and what is wrong with it. A checkpoint must be what its manifest says. Without `verify` no
    weights are read: the newest checkpoint is taken as it is. A name with a commit is the hub's.
    Raises CheckpointError when there is nothing to load, and for a folder of a hub name's form,
    unless it `takes_runs` and the folder is a run or a checkpoint.
    """
    if name == SCRATCH:
        return Source(name=name, kind="scratch")
    if pinned_name(name) is not None:
        return Source(name=name, kind="hub")
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


def pinned(name: str, *, setting: str, earlier: str | None = None) -> str:
    """Return `name` with the commit that its revision stands for now, where it is on the hub.

    What is a folder here, or `scratch`, stays as it is. `earlier` is what an earlier start of the
    same run settled on: if it is the same model, its commit is kept and nobody is asked.
    Raises CheckpointError.
    """
    wanted, before = HubName.parse(name), HubName.parse(earlier or "")
    if earlier == name and (wanted is None or wanted.commit()):
        return name
    if find_source(name, setting=setting, verify=False).kind != "hub":
        return name
    assert wanted is not None
    if before is not None and before.commit() and before.name == wanted.name:
        return name if wanted.commit() else str(before)
    return str(resolve(wanted, setting=setting))


def spec_on_hub(name: HubName, *, setting: str) -> ModelSpec:
    """Return the numbers of a model on the hub, without a download of its weights.

    Raises CheckpointError.
    """
    spec = read_spec(fetch_config(name, setting=setting))
    return spec if spec.is_counted() else spec.with_tensors(weight_shapes(name, setting=setting))


def _weights_in(
    path: Path,
    name: str,
    *,
    setting: str,
    verify: bool,
    passed_over: Callable[[Path, str], None],
) -> Path:
    """Return the folder with the weights that `path`, a folder, stands for."""
    if _is_run(path):
        checkpoints = path if checkpoint_folders(path) else RunPaths(path).checkpoints
        require_own(checkpoints)
        newest = _newest(checkpoints, verify=verify, passed_over=passed_over)
        if newest is None:
            raise CheckpointError(
                f"{setting} = {name!r}: {checkpoints} has no sound checkpoint. Let the run reach "
                "its first one (train.checkpoint_every), or name another run."
            )
        return newest
    if verify and (path / MANIFEST_FILE).exists() and (problems := manifest_problems(path)):
        raise CheckpointError(
            f"{setting} = {name!r}: the checkpoint is damaged: {problems[0]} Name another one."
        )
    return path


def _is_run(path: Path) -> bool:
    """Say whether `path` is a run's folder, or its folder of checkpoints."""
    paths = RunPaths(path)
    known = any(each.exists() for each in (paths.config, paths.plan, paths.checkpoints))
    return known or bool(checkpoint_folders(path))


def _newest(
    checkpoints: Path, *, verify: bool, passed_over: Callable[[Path, str], None]
) -> Path | None:
    if verify:
        return newest_sound(checkpoints, passed_over=passed_over)
    whole = [each for each in checkpoint_folders(checkpoints) if (each / MANIFEST_FILE).exists()]
    return whole[-1] if whole else None


def _require_hub_name(name: str, path: Path, *, setting: str) -> None:
    """Refuse what was meant as a path: a hub's names are NAME or OWNER/NAME, @REVISION behind."""
    if path.exists():
        raise CheckpointError(
            f"{setting} = {name!r}: that is a file and no .gguf. Name the folder it is in."
        )
    is_path = name.startswith(("/", "./", "../", "~")) or HubName.parse(name) is None
    # `runs/typo` is meant as a path where there is a folder `runs`.
    if is_path or (len(path.parts) > 1 and Path(path.parts[0]).is_dir()):
        raise CheckpointError(
            f"{setting} = {name!r}: there is no such folder here. Correct the path, or name a run, "
            "a checkpoint, a folder in the Hugging Face layout or a model on the hub."
        )
