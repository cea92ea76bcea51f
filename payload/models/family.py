"""The interface of a model family: recognises models, gives their sizes and GGUF names.

A family is a folder of this package with a `family.py` and a line in `registry.py`. `family.py` has
a subclass of `Family` and its instance `FAMILY`. `read` returns the family's `ModelSpec`
(`spec.py`). The layers use torch, which this package does not import. So a family only gives the
name of the module with its layers, in the attribute `tensors`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from payload.models.gguf_header import GgufHeader
from payload.models.gguf_plan import GgufPlan
from payload.models.spec import ModelSpec


class Family(ABC):
    """A model family, listed in the registry."""

    model_types: ClassVar[tuple[str, ...]] = ()
    """The values of `model_type` in config.json that only this family reads."""
    tensors: ClassVar[str]
    """Name of the module with `build(spec, dropout=..., random=...)`, which returns the
    CausalLM."""
    presets: ClassVar[Mapping[str, ModelSpec]] = {}
    """Specs by name, for training from scratch and for models with these names on the hub."""
    hub_configs: ClassVar[Mapping[str, Mapping[str, object]]] = {}
    """The config.json of models on the hub, by the last part of their names."""
    tokenizer: ClassVar[str | None] = None
    """The packaged tokenizer for folders without a tokenizer; None = the folder must have one."""
    gguf_architectures: ClassVar[tuple[str, ...]] = ()
    """The architectures, as llama.cpp names them, that can be read from GGUF files."""
    gguf_types: ClassVar[tuple[str, ...]] = ()
    """The values of `model_type` that can be exported to a GGUF file."""

    @abstractmethod
    def read(self, raw: Mapping[str, Any], *, where: str) -> ModelSpec:
        """Return the spec that a config.json describes; `where` names the file in messages.

        Raises CheckpointError.
        """

    def read_folder(self, raw: Mapping[str, Any], *, folder: Path, where: str) -> ModelSpec:
        """Return the spec of the model in `folder`; read the headers of its weights if necessary.

        Raises CheckpointError.
        """
        del folder
        return self.read(raw, where=where)

    def reads_unknown_type(self, raw: Mapping[str, Any]) -> bool:
        """Return whether this family reads a config.json with a `model_type` that no family
        lists."""
        del raw
        return False

    def gguf_config(self, header: GgufHeader, *, where: str) -> dict[str, Any]:
        """Return the config.json of a GGUF file with one of `gguf_architectures`.

        Raises CheckpointError.
        """
        raise NotImplementedError

    def plan_gguf(self, raw: Mapping[str, Any], *, where: str) -> GgufPlan:
        """Return the contents of a GGUF file for a model of one of `gguf_types`.

        Raises CheckpointError for features that llama.cpp computes differently.
        """
        raise NotImplementedError
