"""What the ranks on other nodes left there: their exit records, fetched over ssh."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from payload.launch.plan import LaunchPlan
from payload.launch.ranks import Rank
from payload.results import RunPaths, write_whole

_FETCH_S = 30.0
_SSH_ARGUMENTS = "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"


def fetch_exits(
    paths: RunPaths, *, plan: LaunchPlan, ranks: Sequence[Rank], env: Mapping[str, str]
) -> None:
    """Copy the records of ranks on other nodes into this node's run folder.

    A node that does not answer in time leaves none, like a rank that died without a word.
    """
    words = plan.launcher_environment.get(_SSH_ARGUMENTS)
    nodes = sorted({rank.node for rank in ranks} - {ranks[0].node})
    if words is None or not nodes:
        return

    def fetch(node: str) -> bytes:
        files = [str(paths.rank_exit(rank.rank)) for rank in ranks if rank.node == node]
        argv = ["ssh", *words.split(), node, shlex.join(["cat", "--", *files])]
        try:
            done = subprocess.run(
                argv,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=_FETCH_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return b""
        return done.stdout

    with ThreadPoolExecutor(len(nodes)) as pool:
        for text in pool.map(fetch, nodes):
            for record in records(text.decode(errors="replace")):
                number = record.get("rank")
                if number in {rank.rank for rank in ranks}:
                    write_whole(paths.rank_exit(number), json.dumps(record, indent=2) + "\n")


def records(text: str) -> Iterator[dict[str, Any]]:
    """The JSON objects that follow each other in `text`, up to what is none."""
    decoder = json.JSONDecoder()
    rest = text.strip()
    while rest:
        try:
            record, end = decoder.raw_decode(rest)
        except ValueError:
            return
        if isinstance(record, dict):
            yield record
        rest = rest[end:].lstrip()
