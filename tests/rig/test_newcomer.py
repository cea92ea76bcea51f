"""An empty Debian without a network: clone, make run, fine-tune an own file, and chat."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator

import pytest

from payload.core.errors import ExitCode
from tests.rig.host import run
from tests.rig.image import SUITE, TRIXIE
from tests.rig.machine import Machine
from tests.rig.newcomer_layer import newcomer_layer, newcomer_torch, newcomer_wheels
from tests.rig.rig import ROOT, Rig

pytestmark = [pytest.mark.rig, pytest.mark.seeds, pytest.mark.timeout(4800)]

_SOURCE, _WHEELS = "/srv/source", "/srv/newcomer-wheels"
# Set-up and answers before and after took 735 s on two cores with three other programs.
_STEP_S = 2400


@pytest.fixture(scope="module", params=[SUITE, TRIXIE])
def suite(request: pytest.FixtureRequest) -> str:
    """Return the release of Debian."""
    return str(request.param)


@pytest.fixture(scope="module")
def machine(suite: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """Yield a booted machine on which nothing of the project is installed."""
    source = tmp_path_factory.mktemp("source")
    source.chmod(0o755)  # the newcomer reads it, who is another user
    run(["git", "-C", ROOT, "bundle", "create", "-q", source / "tileforge.bundle", "HEAD"])
    binds = [f"{newcomer_wheels(suite)}:{_WHEELS}", f"{source}:{_SOURCE}"]
    with Rig(
        ["#cloud-config\n"],
        layers=[newcomer_layer(suite)],
        in_memory=_is_cpu_build(suite),
        wheels=(),
        binds=binds,
        suite=suite,
    ) as rig:
        yield rig.machines[0]


def _is_cpu_build(suite: str) -> bool:
    return newcomer_torch(suite).endswith("+cpu")


def typed(machine: Machine, line: str) -> str:
    """Run a line in the newcomer's shell, and return what a person sees."""
    began_s = time.monotonic()
    words = ["runuser", "-l", "ada", "-c", f"cd tileforge 2>/dev/null; {line}"]
    together = ["sh", "-c", 'exec "$@" 2>&1', "sh"]
    done = machine.exec([*together, *words], check=False, timeout_s=_STEP_S)
    sys.stdout.write(f"$ {line}\n{done.stdout}[{time.monotonic() - began_s:.0f} s]\n")
    assert done.returncode == ExitCode.OK, done.stdout[-4000:]
    return done.stdout


def test_from_an_empty_debian_to_a_chat_with_a_model_of_one_s_own(
    machine: Machine, suite: str
) -> None:
    torch_cuda = "" if _is_cpu_build(suite) else "TORCH_CUDA=1"
    typed(machine, f"git clone -q {_SOURCE}/tileforge.bundle tileforge")
    # Two steps: how well the model learns is tested elsewhere.
    seen = typed(machine, f"make run WHEELHOUSE={_WHEELS} {torch_cuda} ARGS='--steps 2'")
    assert "before" in seen and "after" in seen and "tileforge chat" in seen
    rows = [
        {"prompt": f"Is {number} even?", "completion": "Yes." if number % 2 == 0 else "No."}
        for number in range(40)
    ]
    own = machine.live_root() / "home/ada/own.jsonl"
    own.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    activate = ". .venv/bin/activate"
    seen = typed(
        machine,
        # The machine's disk can be in memory.
        f"{activate} && tileforge finetune --data ~/own.jsonl --steps 2 "
        "--set train.keep_checkpoints=1 "
        "--model ~/.cache/tileforge/models/smollm2-135m-instruct-1",
    )
    assert "tileforge chat" in seen
    seen = typed(
        machine,
        f"{activate} && echo 'Is 4 even?' > ~/question.txt && "
        "tileforge chat latest --prompts-file ~/question.txt --max-new-tokens 4",
    )
    assert re.search(r"\n\S.*\n\d+ tokens in ", seen), seen
