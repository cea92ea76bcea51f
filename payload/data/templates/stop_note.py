"""Compares the trained stop token with the tokens at which transformers' `generate` stops."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from payload.core.printable_text import shown
from payload.data.templates.chat_template import ChatTemplate
from payload.data.templates.stop_tokens import generation_stops
from payload.formats.hf_folder import CONFIG_FILE, GENERATION_FILE


def stop_lines(template: ChatTemplate, variables: Mapping[str, Any]) -> list[str]:
    """Return a note if the model's own files do not stop generation at a trained token.

    Returns no note for a folder with a tokenizer alone, and for a template without a stop token.
    """
    ends = template.turn_ends(variables)
    end = ends.get("user") or next(iter(ends.values()), None)
    found = generation_stops(template.tokenizer)
    if end is None or not end.stops or found is None:
        return []
    name, stops = found
    trained = [each for each in end.stops if each in end.last or each in end.next]
    if not trained or set(trained) & set(stops):
        return []
    if stops:
        now = f"stops at {', '.join(map(shown, stops))} (eos_token_id of {name})"
    else:
        now = f"has no stop token (no eos_token_id in {GENERATION_FILE} or {CONFIG_FILE})"
    return [
        f"note: training teaches the stop token {shown(trained[0])}, but the model {now}. Before "
        f"you serve it, add the token's number to eos_token_id of its {GENERATION_FILE}."
    ]
