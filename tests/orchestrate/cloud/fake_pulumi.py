"""A program named `pulumi` for PATH, which prints recorded output."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ENGINE = Path(__file__).parent / "engine"
"""Output of a real engine; its README.md describes each case."""
_URN = (
    "urn:pulumi:dev::tileforge::tileforge:infra:ClusterNodes$gcp:compute/instance:Instance::{name}"
)
# It is started a thousand times, so it does not import `site` and `pathlib`.
_PROGRAM = """#!{python} -IS
import json, os, sys, time
folder = {folder!r}
words = [w for w in sys.argv[1:] if w not in ("--non-interactive", "--color", "never")]
events = None
if "--event-log" in words:
    at = words.index("--event-log")
    events = words[at + 1]
    del words[at : at + 2]
if "--stack" in words:
    at = words.index("--stack")
    stack = words[at + 1]
    del words[at : at + 2]
else:
    stack = None
with open(folder + "/calls.jsonl", "a") as calls:
    calls.write(json.dumps([stack, *words]) + "\\n")
with open(folder + "/answers.json") as file:
    answers = json.load(file)
for answer in answers:
    if words[: len(answer["words"])] == answer["words"] and answer["times"] != 0:
        if answer["times"] > 0:
            answer["times"] -= 1
            # Whole or not at all: an interrupt must not leave half of it for the next call.
            with open(folder + "/answers.new", "w") as file:
                json.dump(answers, file)
            os.replace(folder + "/answers.new", folder + "/answers.json")
        time.sleep(answer["takes_s"])
        if events is not None:
            with open(events, "w") as file:
                file.write(answer["events"])
        sys.stdout.write(answer["out"])
        sys.stdout.flush()
        sys.stderr.write(answer["err"])
        sys.stderr.flush()
        if answer["status"] < 0:
            os.kill(os.getpid(), -answer["status"])
        sys.exit(answer["status"])
sys.exit(f"error: the stand-in has no answer for {{words}}")
"""


def step(op: str, urn: str, *, kind: str = "resourcePreEvent", **more: Any) -> str:
    """Return a line of the event log for an operation on a resource."""
    return json.dumps({"timestamp": 1, kind: {"metadata": {"op": op, "urn": urn, **more}}}) + "\n"


def diagnostic(message: str, severity: str, urn: str = "") -> str:
    """Return a line of the event log for a message."""
    if not message:
        return ""
    said = {"message": message, "severity": severity, "urn": urn, "prefix": "", "color": "never"}
    return json.dumps({"timestamp": 1, "diagnosticEvent": said}) + "\n"


class FakePulumi:
    """The program, in a folder that is first on PATH, and a project folder."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self.bin.mkdir(parents=True)
        self._answers = self.bin / "answers.json"
        self._answers.write_text("[]")
        program = self.bin / "pulumi"
        program.write_text(_PROGRAM.format(python=sys.executable, folder=str(self.bin)))
        program.chmod(0o755)

    def on(
        self,
        *words: str,
        out: str = "",
        err: str = "",
        status: int = 0,
        times: int = -1,
        takes_s: float = 0.0,
        events: str | None = None,
    ) -> None:
        """Set the output of commands that start with `words`; the latest setting wins.

        `events` are the engine's events; without them, a failure is one error with the text of
        `out`, and `err` means that the engine did not start.
        """
        if events is None:
            events = "" if err else diagnostic(out, "error" if status else "info")
        answer = {
            "words": words,
            "out": out,
            "err": err,
            "status": status,
            "times": times,
            "takes_s": takes_s,
            "events": events,
        }
        self._answers.write_text(json.dumps([answer, *json.loads(self._answers.read_text())]))

    def replay(self, case: str, *, status: int, times: int = -1) -> None:
        """Replay a real engine's recorded case for the command that `case` starts with."""
        word = case.partition("-")[0]
        texts = [ENGINE / f"{case}.{kind}" for kind in ("stdout.txt", "stderr.txt", "events.jsonl")]
        out, err, events = (path.read_text() if path.exists() else "" for path in texts)
        self.on(word, out=out, err=err, events=events, status=status, times=times)

    def outputs(self, **values: Any) -> None:
        """Set the stack's outputs."""
        self.on("stack", "output", "--json", out=json.dumps(values, indent=2) + "\n")

    def machines(self, *names: str, going: Sequence[str] = (), place: str = "") -> None:
        """Set the state's machines, and those that the next preview deletes.

        `place` is the prefix of their IDs: projects/P/zones/Z. Without it they have no IDs.
        """
        urns = {name: _URN.format(name=name) for name in names}
        others = ["urn:pulumi:dev::tileforge::gcp:compute/network:Network::net"] if names else []
        resources = [{"urn": urn, "type": urn.split("::")[2]} for urn in [*others, *urns.values()]]
        if place:
            for each in resources[1:]:
                name = each["urn"].rpartition("::")[2]
                each["id"] = f"{place}/instances/{name}"
        state = {"version": 3, "deployment": {"resources": resources} if names else {}}
        self.on("stack", "export", out=json.dumps(state))
        steps = [step("refresh", urn) for urn in urns.values()]
        steps += [step("replace", urn) for urn in others]
        steps += [step("replace", urns[name]) for name in going]
        self.on("preview", events="".join(steps))

    def calls(self) -> list[list[str | None]]:
        """Return the stack and the arguments of each call."""
        path = self.bin / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
