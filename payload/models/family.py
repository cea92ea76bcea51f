"""The interface of a model family: what tells its models, their numbers and its other names.

A family is a folder of this package, whose `family.py` has a class below `Family` and its object
`FAMILY`, and a line of `registry.py`. `read` returns the family's own `ModelSpec` (`spec.py`). Its
layers are tensors, which this package does not import: `tensors` names their module.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from payload.models.gguf_export_plan import GgufPlan
from payload.models.gguf_header import GgufHeader
from payload.models.spec import ModelSpec


class Family(ABC):
    """A model family: one line of the registry."""

    model_types: ClassVar[tuple[str, ...]] = ()
    """Each `model_type` of config.json that is this family's alone."""
    tensors: ClassVar[str]
    """The module with `build(spec, dropout=..., random=...)`, which returns the CausalLM."""
    presets: ClassVar[Mapping[str, ModelSpec]] = {}
    """Models by name, for models from scratch and for the hub's names."""
    hub_configs: ClassVar[Mapping[str, Mapping[str, object]]] = {}
    """config.json of models on the hub, by the last part of their names."""
    tokenizer: ClassVar[str | None] = None
    """The packaged tokenizer of a model whose folder has none; None = the folder must have one."""
    gguf_architectures: ClassVar[tuple[str, ...]] = ()
    """llama.cpp's names of the architectures whose GGUF files are read."""
    gguf_types: ClassVar[tuple[str, ...]] = ()
    """Each `model_type` that is exported as a GGUF file."""

    @abstractmethod
    def read(self, raw: Mapping[str, Any], *, where: str) -> ModelSpec:
        """Return the spec that a config.json describes; `where` names it in messages.

        Raises CheckpointError.
        """

    def read_folder(self, raw: Mapping[str, Any], *, folder: Path, where: str) -> ModelSpec:
        """Return the spec of the model in `folder`, with what the headers of its weights tell.

        Raises CheckpointError.
        """
        del folder
        return self.read(raw, where=where)

    def takes_unknown(self, raw: Mapping[str, Any]) -> bool:
        """Say whether this family reads a config.json whose `model_type` no family names."""
        del raw
        return False

    def gguf_config(self, header: GgufHeader, *, where: str) -> dict[str, Any]:
        """Return config.json of a GGUF file of one of `gguf_architectures`.

        Raises CheckpointError.
        """
        raise NotImplementedError

    def gguf_name(self, tensor: str) -> str:
        """Return llama.cpp's name of a tensor of a model that is read from a GGUF file."""
        raise NotImplementedError

    def plan_gguf(self, raw: Mapping[str, Any], *, where: str) -> GgufPlan:
        """Return what a GGUF file of a model of one of `gguf_types` has.

        Raises CheckpointError for what llama.cpp computes otherwise.
        """
        raise NotImplementedError
