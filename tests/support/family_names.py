"""Finds code outside the model packages that names a model family."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from tests.support.import_rules import tree_of

HOMES = (PurePosixPath("payload/models"), PurePosixPath("payload/train/families"))
# Tokenizers are a separate seam with GPT-2's as a member; GGUF names tokenizers after families.
OTHERS = tuple(
    map(
        PurePosixPath,
        (
            "payload/data",
            "payload/export/gguf_file.py",
            "payload/first_run/packaged_model.py",
            "payload/export/vocabulary.py",
            "payload/generate/codec.py",
            "payload/formats/tokenizer_identity.py",
        ),
    )
)
SETTINGS = {
    PurePosixPath("payload/config/training_sections.py"): frozenset(
        {"gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "n_layer", "n_head", "n_embd"}
    ),
    # Settings that the weights of model.init replace, and settings that a resume cannot change.
    PurePosixPath("payload/config/model_checks.py"): frozenset({"n_layer", "n_head", "n_embd"}),
    PurePosixPath("payload/config/run_config.py"): frozenset({"n_layer", "n_head", "n_embd"}),
    PurePosixPath("payload/config/conflict_examples.py"): frozenset(
        {"model.n_embd=100", "model.n_head=3"}
    ),
}
"""The documented settings of a model trained from scratch."""

_FAMILY = re.compile(
    r"(?<![a-z0-9])(gpt_?2|gpt_?neox|llama|qwen\d*|mistral|gemma\d*|smollm\d*|phi\d|olmo\d*|falcon"
    r"|n_layer|n_head|n_embd|wte|wpe|c_attn|c_proj|q_proj|gate_proj|embed_tokens)(?![a-z0-9])",
    re.IGNORECASE,
)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def family_names(path: PurePosixPath, source: str) -> list[str]:
    """Return line and name of each model family in the code of a file.

    Identifiers and whole string constants count; docstrings and messages are for people.
    """
    if any(path.is_relative_to(home) for home in (*HOMES, *OTHERS)):
        return []
    allowed = SETTINGS.get(path, frozenset())
    return [
        f"{path}:{line}: {name}"
        for line, name in _names(tree_of(source))
        if _FAMILY.search(_CAMEL.sub("_", name)) and name not in allowed
    ]


def _names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield node.lineno, name
            case ast.keyword(arg=str(name)):
                yield node.lineno, name
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.ImportFrom(module=str(name)):
                yield node.lineno, name
                yield from ((node.lineno, alias.name) for alias in node.names)
            case ast.Import():
                yield from ((node.lineno, alias.name) for alias in node.names)
            case ast.Constant(value=str(text)) if " " not in text:
                yield node.lineno, text
            case _:
                continue
