"""The step benchmark on a small model, and its JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness import REPO
from tests.support.waiting import DEADLINE_S

pytestmark = pytest.mark.processes

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
}


def run(module: str, folder: Path, options: str) -> subprocess.CompletedProcess[str]:
    """Run a benchmark on the small model, which is written to `folder`; require success."""
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", module, "--model", str(folder), *options.split()],
        cwd=REPO,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.seeds
def test_the_last_line_has_this_project_s_results_beside_its_peers(tmp_path: Path) -> None:
    options = "--micro-batch-size 2 --sequence-length 16 --steps 2 --threads 1 --json"
    done = run("benchmarks.step", tmp_path, f"{options} --transformers --trl")
    line = json.loads(done.stdout.splitlines()[-1])
    seconds = line["step_s"]["tileforge"]
    assert line["tokens_per_s"] > 0 and len(seconds) == 1
    assert line["mfu"] is None or 0 <= line["mfu"] <= 1
    assert line["cpu_mfu"] > 0
    peaks = line["contender_peak_rss_bytes"]
    assert line["peak_rss_bytes"] == peaks["tileforge"] > 10**8
    assert set(peaks) == {"tileforge", "transformers", "trl"}
    assert line["ratio_vs_transformers"] > 0 and line["ratio_vs_trl"] > 0


@pytest.mark.seeds
def test_auto_ends_with_one_line_to_send(tmp_path: Path) -> None:
    done = run(
        "benchmarks.step",
        tmp_path,
        "--auto --micro-batch-size 1 --sequence-length 16 --steps 2 --threads 1",
    )
    result = json.loads(done.stdout.splitlines()[-1])
    line = done.stderr.splitlines()[-1]
    assert line.startswith(f"class {result['machine_class']}, {os.cpu_count()} CPUs, ")
    expected = (
        f"{tmp_path.name}, 1 x 16 tokens, {result['dtype']}: {result['tokens_per_s']:.0f} tok"
    )
    assert expected in line
    assert f"{result['ratio_vs_transformers']:.2f} times transformers" in line


@pytest.mark.slow
@pytest.mark.bf16
def test_the_profile_has_the_layers_matmuls_and_the_rest(tmp_path: Path) -> None:
    done = run(
        "benchmarks.step_profile", tmp_path, "--micro-batch-size 1 --sequence-length 16 --steps 2"
    )
    result = json.loads(done.stdout.splitlines()[-1])
    kinds = {f"layers: {each}" for each in ("forward matmuls", "input gradients")}
    assert result["s"].keys() >= kinds | {"head: logits", "other"}
    # Time that two kinds count would make the rest negative.
    assert all(0 <= each < result["step_s"] for each in result["s"].values())
