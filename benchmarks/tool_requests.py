"""Generated conversations: each request is answered with a call of one of three functions.

Each value of an argument is a generated word or number. Training and held-out requests share no
value.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def _function(name: str, description: str, **arguments: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in arguments.items()}
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [
    _function("get_weather", "Return the weather in a city.", city="string"),
    _function("set_timer", "Start a timer.", minutes="integer"),
    _function("send_message", "Send a text to a person.", person="string", text="string"),
]
"""The functions, in the format of `--tools` and of the column `tools`."""

_WEATHER = (
    "What is the weather in {city}?",
    "Do I need an umbrella in {city} today?",
    "I am going to {city}. How warm is it there?",
    "Does the sun shine in {city}?",
    "Is it raining in {city} now?",
)
_TIMER = (
    "Set a timer for {minutes} minutes.",
    "Wake me in {minutes} minutes.",
    "The cake needs {minutes} minutes, so call me when it is done.",
    "Remind me to leave in {minutes} minutes.",
    "Count down {minutes} minutes for me, please.",
)
_MESSAGE = (
    "Inform {person} that {text}.",
    "Write to {person}: {text}",
    "Let {person} know that {text}.",
    "Please send {person} a note that {text}.",
    "Message {person} and say that {text}.",
)
_THINGS = ("the train", "my order", "the parcel", "our guest", "the meeting", "the new key")
_STATES = ("is late", "has arrived", "is lost", "starts soon", "is ready", "was moved")
_SYLLABLES = ("ba", "co", "den", "fal", "gor", "hel", "ish", "kar", "lum", "mor", "nes", "pol")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request, and the call that answers it."""

    text: str
    function: str
    arguments: dict[str, Any]

    def row(self, number: int) -> dict[str, Any]:
        """Return the conversation in OpenAI's format."""
        call = {"name": self.function, "arguments": self.arguments}
        calls = [{"id": f"call_{number}", "type": "function", "function": call}]
        messages = [
            {"role": "user", "content": self.text},
            {"role": "assistant", "content": "", "tool_calls": calls},
        ]
        return {"messages": messages, "tools": TOOLS}


def requests(train: int, held_out: int, *, seed: int = 1) -> tuple[list[Request], list[Request]]:
    """Return requests for training, and held-out requests with other values."""
    draw = random.Random(seed)
    total = train + held_out
    kinds: list[tuple[str, tuple[str, ...], Callable[[], dict[str, Any]]]] = [
        ("get_weather", _WEATHER, lambda: {"city": _name(draw)}),
        ("set_timer", _TIMER, lambda: {"minutes": draw.randint(2, 999)}),
        ("send_message", _MESSAGE, lambda: {"person": _name(draw), "text": _text(draw)}),
    ]
    rows: list[Request] = []
    seen: set[Any] = set()
    while len(rows) < total:
        function, phrases, make = kinds[len(rows) % len(kinds)]
        values = make()
        if seen.isdisjoint(values.values()):
            seen.update(values.values())
            text = draw.choice(phrases).format(**values)
            rows.append(Request(text=text, function=function, arguments=values))
    return rows[:train], rows[train:]


def _name(draw: random.Random) -> str:
    return "".join(draw.choices(_SYLLABLES, k=draw.randint(2, 4))).capitalize()


def _text(draw: random.Random) -> str:
    return f"{draw.choice(_THINGS)} for {_name(draw)} {draw.choice(_STATES)}"
