"""The sampling settings that the user does not choose.

A chat uses the values in the model's generation_config.json, as transformers and vLLM do. Without
these values, a chat decodes greedily and ignores `top_k`, like transformers.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from payload.generate.sampling import SamplingOptions

CONTINUATION = SamplingOptions()
"""Settings for continuing prompts, which are the same as in nanoGPT."""
ANSWER = replace(CONTINUATION, max_new_tokens=1024, temperature=0.0, top_k=50, num_samples=1)
"""Settings for a chat with a model that has no generation_config.json.

Decoding is greedy, because random draws from a model after few steps are often off the topic. If
the user chooses a temperature, `top_k` is 50, as in transformers.
"""

_VALID: Mapping[str, Callable[[float], bool]] = {
    "temperature": lambda value: 0 <= value < math.inf,
    "top_k": lambda value: isinstance(value, int) and 0 <= value < 2**31,
    "top_p": lambda value: 0 < value <= 1,
    "repetition_penalty": lambda value: 0 < value < math.inf,
}
"""For each setting in generation_config.json that is used, a function that returns True for a valid
number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenSampling:
    """The settings, and a line about the values that come from the model."""

    options: SamplingOptions
    note: str | None


def sampling_of(
    arguments: Namespace, *, is_chat: bool, generation_config: Mapping[str, Any]
) -> ChosenSampling:
    """Return the user's settings.

    In a chat, the model's settings are used for settings that the user did not choose. All other
    settings have their defaults.
    """
    own = _own(generation_config) if is_chat else {}
    found = ANSWER if is_chat else CONTINUATION
    if is_chat and (arguments.num_samples or 1) > 1:
        # Greedy samples would all be equal.
        found = replace(found, temperature=CONTINUATION.temperature)
    given = {
        "max_new_tokens": arguments.max_new_tokens,
        "temperature": arguments.temperature,
        "top_k": arguments.top_k,
        "top_p": arguments.top_p,
        "num_samples": arguments.num_samples,
        "seed": arguments.seed,
        "repetition_penalty": arguments.repetition_penalty,
    }
    given = {name: value for name, value in given.items() if value is not None}
    used = {name: value for name, value in own.items() if name not in given}
    options = replace(found, **{**used, **given})
    listed = ", ".join(f"{name} {value:g}" for name, value in used.items())
    return ChosenSampling(
        # The command line and generation_config.json write 0 for all tokens.
        options=replace(options, top_k=options.top_k or None),
        note=f"sampling: {listed}, from the model's generation_config.json" if used else None,
    )


def _own(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the valid sampling settings of a generation_config.json."""
    found = {
        name: config[name]
        for name, is_valid in _VALID.items()
        if type(config.get(name)) in (int, float) and is_valid(config[name])
    }
    return found | ({"temperature": 0.0} if config.get("do_sample") is False else {})
