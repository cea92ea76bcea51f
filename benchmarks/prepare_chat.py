"""Rows a second of `prepare --task chat` on short conversations, its memory, and where time goes.

    python -m benchmarks.prepare_chat [--rows 1000000] [--turns 2]

A turn is a question and an answer of 3 to 20 words from the standard library's text. The tokenizer
is a byte-level BPE of 8,192 tokens, trained on this text, with a ChatML template. The time covers
the whole command: Python's start and imports, reading, rendering, tokenizing, packing, hashing and
flushing to disk. CPU time is less disturbed by other programs. A load average near 0 at the start
and about two cores used mean that no other program took part of the processor time. Peak memory is
the kernel's high-water mark; the worker's includes the memory of the parent when the worker
started. A second run with up to 20,000 rows measures the parts of the parent's CPU time. Rendering
is the worker process with the template, and the parent's search for the trained text. A table goes
to stderr, one JSON object to stdout; the exit status is 1 if a bound is missed.
"""

from __future__ import annotations

import gc
import json
import os
import random
import re
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import REPO, Benchmark
from payload.data.__main__ import main as data
from payload.data.tasks import chat_reader
from payload.data.templates.turns import RowRendering

SEED = 2357
GOAL_ROWS_PER_S = 6_000
PEAK_BOUND_BYTES = 1_500_000_000
_PART_ROWS = 20_000
_VOCABULARY = 8_192
_START, _END = "<|im_start|>", "<|im_end|>"
_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CHILD = "from benchmarks.prepare_chat import child; child()"


def main(argv: Sequence[str]) -> int:
    """Make the conversations, prepare them and report; return the exit status."""
    benchmark = Benchmark("prepare_chat", __doc__)
    add = benchmark.parser.add_argument
    add("--rows", type=int, default=1_000_000, metavar="COUNT", help="conversations")
    add("--turns", type=int, default=2, metavar="COUNT", help="questions with an answer in each")
    add("--folder", type=Path, metavar="DIR", help="work folder (default: the system's)")
    arguments = benchmark.parse(argv)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        words = _words()
        _make_tokenizer(folder / "model", words)
        rows = {"all": arguments.rows, "part": min(arguments.rows, _PART_ROWS)}
        for each, count in rows.items():
            _write_rows(folder / f"{each}.jsonl", words, count=count, turns=arguments.turns)
        whole = _prepare(folder, "all", timed=False)
        part = _prepare(folder, "part", timed=True)
    result = {**_result(whole, part, rows), **whole["counts"], "load_at_start": round(load, 1)}
    _report(benchmark, result, rows)
    benchmark.finish(result, packages=("gigatoken", "tokenizers", "jinja2", "numpy"))
    return exit_status(result)


def exit_status(result: dict[str, Any]) -> int:
    """Return 1 if the memory or the rows a second miss their bound."""
    holds = result["parent_peak_bytes"] + result["worker_peak_bytes"] < PEAK_BOUND_BYTES
    return 0 if holds and result["rows_per_s"] >= GOAL_ROWS_PER_S else 1


def child() -> None:
    """Run `prepare` in this process, and print its resources as JSON.

    With the environment variable TIMED, also the CPU seconds of `RowRendering`.
    """
    spent_s = [0.0]

    class Timed(RowRendering):
        """Measures the thread's CPU time of each step."""

        __init__ = _timed(RowRendering.__init__, spent_s)
        request = _timed(RowRendering.request, spent_s)
        samples = _timed(RowRendering.samples, spent_s)

    if os.environ.get("TIMED"):
        vars(chat_reader)["RowRendering"] = Timed
    status = data(sys.argv[1:])
    # The worker ends with the job, and is counted from then on.
    gc.collect()
    parent = resource.getrusage(resource.RUSAGE_SELF)
    worker = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = {
        "parent_cpu_s": parent.ru_utime + parent.ru_stime,
        "parent_peak_bytes": parent.ru_maxrss * 1024,
        "worker_cpu_s": worker.ru_utime + worker.ru_stime,
        "worker_peak_bytes": worker.ru_maxrss * 1024,
        "trained_text_cpu_s": spent_s[0],
    }
    print(json.dumps(found))
    sys.exit(status)


def _timed(call: Callable[..., Any], spent_s: list[float]) -> Callable[..., Any]:
    def timed(*given: Any, **named: Any) -> Any:
        began_s = time.thread_time()
        try:
            return call(*given, **named)
        finally:
            spent_s[0] += time.thread_time() - began_s

    return timed


def _prepare(folder: Path, name: str, *, timed: bool) -> dict[str, Any]:
    """Run the command in a separate process; return its resources and counts."""
    out = folder / f"out_{name}"
    words = ["prepare", "--task", "chat", "--source", "jsonl", "--input", folder / f"{name}.jsonl"]
    words += ["--tokenizer", folder / "model", "--out", out, "--quiet"]
    began_s = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, *map(str, words)],
        cwd=REPO,
        env=os.environ | {"TIMED": "1" if timed else ""},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    wall_s = time.perf_counter() - began_s
    meta = json.loads((out / "meta.json").read_text(encoding="utf-8"))
    counts = {
        "documents": meta["train_documents"] + meta["val_documents"],
        "tokens": meta["train_tokens"] + meta["val_tokens"],
    }
    return {**json.loads(done.stdout.splitlines()[-1]), "wall_s": wall_s, "counts": counts}


def _result(
    whole: dict[str, Any], part: dict[str, Any], rows: dict[str, int]
) -> dict[str, float | int]:
    """Return the rates and memory of the whole run, with the shares of the timed part."""
    count = rows["all"]
    worker_ms, parent_ms = (1e3 * whole[f"{each}_cpu_s"] / count for each in ("worker", "parent"))
    trained_ms = 1e3 * part["trained_text_cpu_s"] / rows["part"]
    return {
        "wall_s": round(whole["wall_s"], 1),
        "rows_per_s": round(count / whole["wall_s"]),
        "cores_used": round((worker_ms + parent_ms) * count / 1e3 / whole["wall_s"], 2),
        "cpu_ms_per_row": round(worker_ms + parent_ms, 4),
        "parent_cpu_ms_per_row": round(parent_ms, 4),
        "worker_cpu_ms_per_row": round(worker_ms, 4),
        "trained_text_cpu_ms_per_row": round(trained_ms, 4),
        "other_cpu_ms_per_row": round(parent_ms - trained_ms, 4),
        "rendering_share": round((worker_ms + trained_ms) / (worker_ms + parent_ms), 3),
        "parent_peak_bytes": whole["parent_peak_bytes"],
        "worker_peak_bytes": whole["worker_peak_bytes"],
    }


def _report(benchmark: Benchmark, result: dict[str, Any], rows: dict[str, int]) -> None:
    parts = {
        "worker: the template": "worker_cpu_ms_per_row",
        "parent: the trained text": "trained_text_cpu_ms_per_row",
        "parent: reading, tokenizing, packing, writing": "other_cpu_ms_per_row",
        "parent": "parent_cpu_ms_per_row",
        "both": "cpu_ms_per_row",
    }
    table = benchmark.table("CPU ms a row", "share", title="process: work", labels=parts)
    for label, key in parts.items():
        share = result[key] / result["cpu_ms_per_row"]
        table.row(label, f"{result[key]:.3f}", f"{share:.0%}")
    table = benchmark.table("result", "goal", title="whole command", labels=("rows a second",))
    table.row("rows a second", f"{result['rows_per_s']:,}", f"{GOAL_ROWS_PER_S:,}")
    table.row("rows", f"{rows['all']:,}")
    table.row("seconds", f"{result['wall_s']:,}")
    table.row("cores used", f"{result['cores_used']:,}")
    table.row("load average at the start", f"{result['load_at_start']:,}")
    table.row("parent, peak MB", f"{result['parent_peak_bytes'] / 1e6:,.0f}", "both 1,500")
    table.row("worker, peak MB", f"{result['worker_peak_bytes'] / 1e6:,.0f}")
    benchmark.note(
        f"Rendering is {result['rendering_share']:.0%} of the CPU time. "
        f"{result['documents']:,} conversations became {result['tokens']:,} tokens of blocks."
    )


def _words() -> list[str]:
    """Return words from the standard library's modules, in order."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py"))
    text = "".join(each.read_text(encoding="utf-8") for each in files)
    return re.findall(r"[A-Za-z]{2,}[,.]?", text)


def _make_tokenizer(folder: Path, words: Sequence[str]) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=[_START, _END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    lines = (" ".join(words[start : start + 100]) for start in range(0, len(words), 100))
    tokenizer.train_from_iterator(lines, trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _END}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")


def _write_rows(path: Path, words: Sequence[str], *, count: int, turns: int) -> None:
    draw = random.Random(SEED)

    def text() -> str:
        size = draw.randint(3, 20)
        start = draw.randrange(len(words) - size)
        return " ".join(words[start : start + size])

    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            roles = ("user", "assistant") * turns
            messages = [{"role": role, "content": text()} for role in roles]
            file.write(json.dumps({"messages": messages}) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
