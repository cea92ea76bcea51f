"""Sampling with the key-value cache, against nanoGPT's own `generate`.

    python -m benchmarks.generate --nanogpt CHECKOUT [--preset gpt2] [--tokens 200] [--rounds 3]

Same random weights, fp32 as in nanoGPT's sample.py on a CPU, one text, always the likeliest token,
so that both write the same text, which is compared. nanoGPT's model.py is used as it is. The two
run in turn; medians count. A table goes to stderr, one JSON object to stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.nanogpt_parity import nanogpt_state
from benchmarks.tables import Table
from payload.data.tokenizers.gpt2 import VOCAB_SIZE
from payload.generate.sampling import SamplingOptions, sample
from payload.models.gpt2.spec import PRESETS, Gpt2Spec
from payload.train.families.gpt2.model import GPT

RATIO_BOUND = 3.0
"""Bound of the ratio for 200 tokens of gpt2; the exit status tells if it is reached."""
SEQUENCE_LENGTH = 1024
PROMPT = (50256,)


def main(argv: Sequence[str]) -> int:
    """Measure in turn, compare the texts, print; 1 when they differ or the bound is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generate", description=__doc__)
    parser.add_argument("--nanogpt", type=Path, required=True, metavar="DIR", help="a checkout")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="gpt2")
    parser.add_argument("--tokens", type=int, default=200, metavar="COUNT")
    parser.add_argument("--rounds", type=int, default=3, metavar="COUNT")
    arguments = parser.parse_args(argv)
    torch.manual_seed(1337)
    preset = PRESETS[arguments.preset]
    shape = Gpt2Spec(
        n_layer=preset.n_layer,
        n_head=preset.n_head,
        n_embd=preset.n_embd,
        sequence_length=SEQUENCE_LENGTH,
        vocab_size=VOCAB_SIZE,
        # nanoGPT's.
        activation="gelu",
    )
    model = GPT(shape).eval()
    ours = _ours(model, arguments.tokens)
    theirs = _nanogpt(model, arguments.nanogpt.resolve(), arguments.tokens)
    same = ours() == theirs()
    times = [(_seconds(ours), _seconds(theirs)) for _ in range(arguments.rounds)]
    ours_s, theirs_s = (statistics.median(column) for column in zip(*times, strict=True))
    ratio = statistics.median(b / a for a, b in times)
    table = Table("tokens/s", "ratio", labels=["tileforge"])
    table.row("tileforge", f"{arguments.tokens / ours_s:.1f}", f"{ratio:.1f}")
    table.row("nanoGPT", f"{arguments.tokens / theirs_s:.1f}", "1")
    table.note(f"texts equal: {same}")
    result = {
        "benchmark": "generate",
        "preset": arguments.preset,
        "tokens": arguments.tokens,
        "rounds": arguments.rounds,
        "tokens_per_s": round(arguments.tokens / ours_s, 1),
        "nanogpt_tokens_per_s": round(arguments.tokens / theirs_s, 1),
        "ratio_vs_nanogpt": round(ratio, 2),
        "bound": RATIO_BOUND,
        "texts_equal": same,
        "versions": {"torch": torch.__version__},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} "
        f"threads, Python {platform.python_version()}",
    }
    print(json.dumps(result))
    return 0 if same and ratio >= RATIO_BOUND else 1


def _ours(model: GPT, tokens: int) -> Callable[[], list[int]]:
    options = SamplingOptions(max_new_tokens=tokens, temperature=0.0, num_samples=1)

    def run() -> list[int]:
        # No token ends the text: a random model must write as many as were asked for.
        (made,) = sample(
            model, PROMPT, options=options, stop_tokens=frozenset(), num_tokens=VOCAB_SIZE
        )
        return made

    return run


def _nanogpt(model: GPT, checkout: Path, tokens: int) -> Callable[[], list[int]]:
    sys.path.insert(0, str(checkout))
    import model as nanogpt_model  # type: ignore[import-not-found]  # in its checkout

    shape = model.spec
    sizes = {"n_layer": shape.n_layer, "n_head": shape.n_head, "n_embd": shape.n_embd}
    config = nanogpt_model.GPTConfig(
        **sizes, block_size=shape.sequence_length, vocab_size=shape.vocab_size, bias=True
    )
    peer: Any = nanogpt_model.GPT(config).eval()
    peer.load_state_dict(nanogpt_state(model))

    def run() -> list[int]:
        with torch.no_grad():
            texts = peer.generate(torch.tensor([PROMPT]), tokens, temperature=1.0, top_k=1)
        return list(map(int, texts[0, len(PROMPT) :]))

    return run


def _seconds(run: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    run()
    return time.perf_counter() - started_s


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
