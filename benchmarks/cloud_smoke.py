"""The whole way through Google Cloud, once: up, train, lose a node, resume, down, sweep.

    python -m benchmarks.cloud_smoke --project ID [--stack NAME] > page.md

It costs money: it builds the stack's cluster for about half an hour. So it asks for the project's
name twice, and refuses a stack whose own limit (maxHourlyUsd) is above --max-hourly-usd. Whatever
happens, also at Ctrl-C, it ends with `down` and `sweep`. What happens is told on stderr, a dated
result page is printed on stdout; the exit status is 0 when every step ended as it should.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from payload import __version__
from payload.config.run_config import load_run_config
from payload.core.errors import BudgetError, ConfigError, ExitCode, TileforgeError, UsageError
from payload.launch.ranks import place_ranks
from payload.orchestrate.clouds.gcp.client import Google
from payload.orchestrate.clouds.gcp.endpoints import Endpoints
from payload.orchestrate.clouds.gcp.removal import remove
from payload.orchestrate.clouds.gcp.removal_order import Resource
from payload.orchestrate.clouds.pulumi.engine import Pulumi
from payload.orchestrate.clouds.pulumi.stack_config import settings
from payload.orchestrate.clouds.pulumi.stack_outputs import StackOutputs, read_outputs
from payload.orchestrate.runs.run_input_checks import check_data
from payload.stack.cloud_requirements import need_of

_WAIT = ("--wait", "20")  # minutes for machines to boot
_STEPS_S = 900.0
_PAUSE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One command and how it ended."""

    name: str
    status: int
    took_s: float
    expected: Collection[int]

    @property
    def is_good(self) -> bool:
        """Return True if it ended as it should."""
        return self.status in self.expected


class Orchestrator:
    """`python -m payload.orchestrate`, in processes of its own."""

    def __init__(self, env: Mapping[str, str]) -> None:
        """`env` is what they run in."""
        self.env = dict(env)

    def run(self, *words: str) -> int:
        """The exit status of a command; what it prints goes to stderr."""
        return subprocess.run(
            self._argv(words), env=self.env, stdout=sys.stderr, check=False
        ).returncode

    def read(self, *words: str) -> str:
        """Return a command's stdout."""
        return subprocess.run(
            self._argv(words), env=self.env, stdout=subprocess.PIPE, text=True, check=False
        ).stdout

    def _argv(self, words: Sequence[str]) -> list[str]:
        return [sys.executable, "-m", "payload.orchestrate", *words]


@dataclass(slots=True, kw_only=True)
class Smoke:
    """One way through; `steps` grows."""

    orchestrator: Orchestrator
    pulumi: Pulumi
    google: Google
    max_hourly_usd: float
    config: Path
    num_steps: int
    filestore: str | None = None
    """The Filestore instance that goes with the cluster."""
    sleep: Callable[[float], None] = time.sleep
    run_id: str = field(default_factory=lambda: f"smoke-{secrets.token_hex(3)}")
    steps: list[Step] = field(default_factory=list)

    def through(self) -> StackOutputs:
        """Everything up to the end of the training. Raises TileforgeError at the first bad step."""
        stack = f"stack:{self.pulumi.stack}" if self.pulumi.stack else "stack"
        self._step("up", "up", "--yes", "--results-may-be-lost", *self._stack())
        outputs = self._priced()
        job = ("--inventory", stack, *self._job(outputs))
        self._step("preflight", "preflight", *job, *_WAIT)
        self._step("run", "run", *job, "--run-id", self.run_id, "--detach")
        self._until_step(self._half())
        victim = outputs.inventory.nodes[-1]
        began = time.monotonic()
        node = Resource(kind="instance", name=victim.name, location=victim.zone or "")
        failed = remove(self.google, [node])
        self._note(f"kill {victim.name}", 1 if failed else 0, began, expected=(0,))
        self._step("the run notices", "attach", self.run_id, expected=(ExitCode.RANK_LOST,))
        self._step("up again", "up", "--yes", "--results-may-be-lost", *self._stack())
        self._step("preflight again", "preflight", *job, *_WAIT)
        self._step("resume", "run", "--inventory", stack, "--resume", self.run_id)
        return outputs

    def down(self, cluster: str | None) -> None:
        """Destroy, and look twice; nothing is raised, as this must go to its end."""
        without = [] if all(step.is_good for step in self.steps) else ["--without-collect"]
        data = ["--delete-filestore", self.filestore] if self.filestore else []
        self._run("down", "down", "--yes", *self._stack(), *without, *data)
        if cluster is not None:
            project = ("--project", self.google.project)
            self._run("sweep", "sweep", "--cluster", cluster, *project, "--keep-buckets")

    def _job(self, outputs: StackOutputs) -> list[str]:
        """The config, with a batch that this cluster's ranks share evenly, and resumable."""
        config = load_run_config(self.config)
        nodes = outputs.inventory.nodes
        ranks = place_ranks(nodes, config.launch, device=config.device).world_size
        per_pass = config.batch.per_pass(ranks)
        values = {
            "batch.global_batch_size": -(-config.batch.global_batch_size // per_pass) * per_pass,
            "train.steps": self.num_steps,
            "train.checkpoint_every": self._half() // 2,
        }
        sets = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
        return ["--config", str(self.config), *sets]

    def _half(self) -> int:
        return max(2, self.num_steps // 2)

    def _stack(self) -> list[str]:
        return ["--stack", self.pulumi.stack] if self.pulumi.stack else []

    def _priced(self) -> StackOutputs:
        outputs = read_outputs(self.pulumi)
        if outputs.hourly_usd is None or outputs.hourly_usd > self.max_hourly_usd:
            raise BudgetError(
                f"the cluster costs {outputs.hourly_usd} dollars an hour, the limit is "
                f"{self.max_hourly_usd:g}. It is taken down again."
            )
        return outputs

    def _until_step(self, step: int) -> None:
        began = time.monotonic()
        while time.monotonic() - began < _STEPS_S:
            text = self.orchestrator.read("status", self.run_id, "--json")
            view = json.loads(text or "{}")
            if view.get("status") not in ("starting", "running") or view["step"] >= step:
                break
            self.sleep(_PAUSE_S)
        reached = view.get("step", 0) >= step
        self._note(f"{step} steps", 0 if reached else 1, began, expected=(0,))

    def _step(self, name: str, *words: str, expected: Collection[int] = (0,)) -> None:
        """Raises TileforgeError when it does not end as it should."""
        began = time.monotonic()
        self._note(name, self._call(*words), began, expected=expected)

    def _run(self, name: str, *words: str) -> None:
        began = time.monotonic()
        status = self._call(*words)
        took_s = time.monotonic() - began
        self.steps.append(Step(name=name, status=status, took_s=took_s, expected=(0,)))

    def _note(self, name: str, status: int, began: float, *, expected: Collection[int]) -> None:
        took_s = time.monotonic() - began
        step = Step(name=name, status=status, took_s=took_s, expected=expected)
        self.steps.append(step)
        if not step.is_good:
            wanted = " or ".join(str(int(code)) for code in expected)
            raise TileforgeError(f"step {name!r} ended with {status}, not {wanted}")

    def _call(self, *words: str) -> int:
        print(f"+ {' '.join(words)}", file=sys.stderr, flush=True)
        return self.orchestrator.run(*words)


def main(
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    answers: TextIO,
    orchestrator: Orchestrator | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Guard, go through, tidy up, print the page."""
    arguments = _parser().parse_args(argv)
    try:
        pulumi = Pulumi(env, folder=Path.cwd(), stack=arguments.stack)
        data = load_run_config(arguments.config).data
        check_data(Path(data.dir), sequence_length=data.sequence_length)
        _guard(pulumi, arguments, answers)
        smoke = Smoke(
            orchestrator=orchestrator or Orchestrator(env),
            pulumi=pulumi,
            google=Google(arguments.project, endpoints=Endpoints.from_env(env)),
            max_hourly_usd=arguments.max_hourly_usd,
            config=arguments.config,
            num_steps=arguments.steps,
            filestore=arguments.delete_filestore,
            sleep=sleep,
        )
    except TileforgeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return _go(smoke)


def _go(smoke: Smoke) -> int:
    began = time.monotonic()
    outputs, trouble = None, None
    try:
        outputs = smoke.through()
    except TileforgeError as error:
        trouble = str(error)
    except KeyboardInterrupt:
        trouble = "interrupted"
    if trouble:
        print(f"error: {trouble}; taking everything down", file=sys.stderr)
    outputs = outputs or _outputs_if_any(smoke.pulumi)
    smoke.down(outputs.inventory.cluster if outputs else None)
    print(page(smoke, outputs, took_s=time.monotonic() - began, trouble=trouble))
    return 0 if trouble is None and all(step.is_good for step in smoke.steps) else 1


def page(smoke: Smoke, outputs: StackOutputs | None, *, took_s: float, trouble: str | None) -> str:
    """The result page, in Markdown."""
    lines = [
        "# The way through Google Cloud",
        "",
        "    python -m benchmarks.cloud_smoke --project ID",
        "",
        f"{datetime.now(UTC):%Y-%m-%d}, Tileforge {__version__}.",
    ]
    if outputs is not None:
        nodes = outputs.inventory.nodes
        usd = outputs.hourly_usd
        cost = "not known" if usd is None else f"at most ${usd * took_s / 3600:.2f}"
        lines.append(
            f"{len(nodes)} x {nodes[0].machine_type} in {nodes[0].zone}; {took_s / 60:.1f} min in "
            f"all, {cost} for the machines and disks."
        )
    lines += ["", "| Step | Exit code | Seconds | |", "|---|---|---|---|"]
    for step in smoke.steps:
        word = "as it should" if step.is_good else "NOT as it should"
        lines.append(f"| {step.name} | {step.status} | {step.took_s:.1f} | {word} |")
    if trouble:
        lines += ["", f"It broke off: {trouble}."]
    return "\n".join(lines)


def _guard(pulumi: Pulumi, arguments: argparse.Namespace, answers: TextIO) -> None:
    """Raises when the operator, or the stack's config, does not mean this."""
    known = settings(pulumi)
    if known.get("project") != arguments.project:
        raise ConfigError(
            f"the stack's project is {known.get('project')!r}, --project is {arguments.project!r}."
        )
    try:
        limit = float(str(known.get("maxHourlyUsd") or "inf"))
    except ValueError:
        limit = float("inf")
    if limit > arguments.max_hourly_usd:
        raise BudgetError(
            f"the stack may cost {known.get('maxHourlyUsd')} dollars an hour (maxHourlyUsd), this "
            f"test at most {arguments.max_hourly_usd:g}. Lower it: pulumi config set maxHourlyUsd "
            f"{arguments.max_hourly_usd:g}"
        )
    if need_of(known).has_filestore and not arguments.delete_filestore:
        raise ConfigError(
            "the stack has sharedStorage filestore, which would be left. Let it be deleted, with "
            "all data on it: --delete-filestore NAME"
        )
    for ask in ("This builds machines that cost money. The project's name:", "Once more:"):
        print(ask, end=" ", file=sys.stderr, flush=True)
        if answers.readline().strip() != arguments.project:
            raise UsageError(f"that is not {arguments.project}; nothing was built.")


def _outputs_if_any(pulumi: Pulumi) -> StackOutputs | None:
    try:
        return read_outputs(pulumi)
    except TileforgeError:
        return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cloud_smoke")
    parser.add_argument("--project", required=True, metavar="ID", help="has to be the stack's")
    parser.add_argument("--stack", metavar="NAME", help="(default: the selected one)")
    parser.add_argument("--delete-filestore", metavar="NAME", help="as of `down`")
    parser.add_argument("--max-hourly-usd", type=float, default=5.0, metavar="USD")
    parser.add_argument("--steps", type=int, default=20, metavar="COUNT")
    parser.add_argument(
        "--config", type=Path, default=Path("payload/configs/quickstart.toml"), metavar="FILE"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ, answers=sys.stdin))
