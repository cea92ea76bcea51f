"""The scaling benchmark: its arithmetic on small records, and one exchange of real ranks."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.scaling.__main__ import main, summarise
from benchmarks.scaling.fit import Constants, efficiencies, fit, points, predictions, step_medians
from benchmarks.scaling.runs import Arrangement, Work
from payload.config.run_config import parse_run_config
from payload.estimates.gradient_buckets import buckets
from payload.models.gpt2.spec import PRESETS
from tests.support.launching import BIN

TINY = buckets(PRESETS["tiny"])
NUMBERS = sum(bucket.elements for bucket in TINY)
KNOWN = Constants(
    link_share=0.9,
    latency_s=2e-4,
    loopback_bytes_per_s=2e9,
    hosts_bytes_per_s=1.5e9,
    busy_s_per_byte=5e-10,
    convert_s_per_number=6e-10,
)


def record(arrangement: str, *, ranks: int = 2, gbit: float | None = None, **more: Any) -> Any:
    setting = {"micro_batch_size": 1, "accumulation": 4, "sequence_length": 1024, "dtype": "bf16"}
    work = {"model": "tiny", "grad_dtype": "fp32", "connections": 1, "load_before": 0.5}
    place = {"arrangement": arrangement, "ranks": ranks, "gbit_per_s": gbit}
    return {**setting, **work, **place, **more}


def steps(arrangement: str, *times_s: float, sync_s: float = 0.0, **more: Any) -> Any:
    waits, busy = [sync_s] * len(times_s), [each / 2 for each in times_s]
    return record(
        arrangement, step_s=list(times_s), sync_s=waits, cpu_s=busy, last_loss=10.0, **more
    )


def exchange(*, ranks: int = 2, gbit: float | None = None, known: Constants = KNOWN) -> Any:
    """Return the measurement that a model with these constants would give."""
    network = known.network(ranks=ranks, gbit_per_s=gbit)
    took_s = sum(network.all_reduce_s(4 * bucket.elements) for bucket in TINY)
    sent = 4 * NUMBERS * 2 * (ranks - 1) / ranks
    name = f"exchange:{ranks}" + (f":{gbit:g}" if gbit else "")
    return record(
        name,
        ranks=ranks,
        gbit=gbit,
        buckets=len(TINY),
        numbers=NUMBERS,
        took_s=[took_s, 9 * took_s, took_s],
        cpu_s=[sent * known.busy_s_per_byte] * 3,
        small_s=1e-4,
        convert_s=NUMBERS * known.convert_s_per_number,
    )


EXCHANGES = [exchange(), exchange(gbit=1.0), exchange(gbit=0.3), exchange(ranks=4, gbit=0.3)]


def test_efficiency_is_the_median_step_of_one_rank_over_that_of_two() -> None:
    records = [
        steps("alone", 8.0, 9.0, ranks=1),
        steps("alone", 20.0, ranks=1),
        steps("side-by-side", 10.0, 9.0, 11.0, ranks=1),
        steps("loopback", 12.0, 12.0, 50.0),
        steps("loopback", 20.0, 20.0, grad_dtype="bf16"),
    ]
    medians = step_medians(records)
    assert medians["alone"] == {
        "step_s": 9.0,
        "sync_s": 0.0,
        "best_s": 8.0,
        "cpu_s": 4.5,
        "steps": 3,
    }
    shares = efficiencies(medians)
    assert set(shares) == {"loopback", "loopback+bf16"}
    assert (shares["loopback"]["vs_alone"], shares["loopback"]["vs_side_by_side"]) == (0.75, 0.8333)
    assert shares["loopback+bf16"]["best_vs_alone"] == 0.4
    assert shares["loopback+bf16"]["cpu_vs_side_by_side"] == 0.5
    assert summarise(records)["tokens_per_s"] == pytest.approx(2 * 4 * 1024 / 12.0, abs=0.1)


def test_the_fit_finds_the_constants_that_the_exchanges_were_made_of() -> None:
    found = fit(EXCHANGES)
    assert found.link_share == pytest.approx(0.9)
    assert found.latency_s == pytest.approx(2e-4)
    assert found.loopback_bytes_per_s == pytest.approx(2e9)
    assert found.busy_s_per_byte == pytest.approx(5e-10)
    assert found.convert_s_per_number == pytest.approx(6e-10)
    assert {each["error"] for each in points(EXCHANGES, found)} == {0.0}


def test_a_cable_that_the_processors_cannot_fill_says_what_they_move_and_nothing_else() -> None:
    found = fit([*EXCHANGES, exchange(gbit=20.0)])
    assert found.hosts_bytes_per_s == pytest.approx(1.5e9)
    without = fit(EXCHANGES)
    assert without == replace(found, hosts_bytes_per_s=without.loopback_bytes_per_s)
    assert KNOWN.network(ranks=2, gbit_per_s=100.0).bytes_per_s == 1.5e9
    assert KNOWN.network(ranks=2, gbit_per_s=8.0).bytes_per_s == 0.9e9


def test_without_the_exchanges_it_needs_the_fit_says_which_are_missing() -> None:
    with pytest.raises(ValueError, match="exchange:2:1"):
        fit(EXCHANGES[:2])
    with pytest.raises(ValueError, match=r"\(exchange:2\)"):
        fit(EXCHANGES[1:])
    assert summarise(EXCHANGES[1:])["fit"].startswith("none: no exchange on one machine")


def test_the_error_at_a_measured_step_is_the_model_s_and_not_the_fit_s() -> None:
    # Processors are busy for half of the time: 6 seconds of computing.
    measured = [steps("side-by-side", 12.0, ranks=1), steps("hosts:1", 13.0, sync_s=0.2, gbit=1.0)]
    by_what = {each["what"]: each for each in points([*EXCHANGES, *measured], KNOWN)[-4:]}
    # The head's gradient, 28 of 29 MB, is exchanged first, in a backward pass that takes one
    # second. Before its exchange ends, all other buckets are full, and follow.
    sent = buckets(PRESETS["tiny"], tokens=2048)
    network = KNOWN.network(ranks=2, gbit_per_s=1.0)
    exchange_s = sum(network.all_reduce_s(4 * bucket.elements) for bucket in sent)
    exposed_s = sent[0].ready + exchange_s - 1.0
    assert by_what["sync_s"]["predicted"] == pytest.approx(exposed_s, abs=1e-4)
    assert by_what["sync_s"]["error"] == pytest.approx(exposed_s / 0.2 - 1, abs=1e-3)
    numbers = sum(bucket.elements for bucket in sent)
    busy_s = 5e-10 * 4 * numbers * (1 - exposed_s / exchange_s)
    assert by_what["step_s"]["predicted"] == pytest.approx(6 + exposed_s + busy_s, abs=1e-3)
    assert by_what["step_s"]["error"] == pytest.approx((6 + exposed_s + busy_s) / 13 - 1, abs=1e-3)
    assert by_what["cpu_s"]["predicted"] == pytest.approx(6 + 5e-10 * 4 * numbers, abs=1e-3)


def test_predictions_fall_with_nodes_and_rise_with_bandwidth_and_slower_processors() -> None:
    table = {
        (row["computes_times_as_fast"], row["nodes"], row["gbit_per_s"]): row["efficiency"]
        for row in predictions([steps("side-by-side", 2.0, ranks=1)], KNOWN)
        if row["grad_dtype"] == "fp32"
    }
    assert table[1, 3, 16.0] > table[1, 16, 16.0] > table[1, 64, 16.0]
    assert table[30, 64, 10.0] < table[30, 64, 16.0] < table[30, 64, 32.0]
    assert table[1, 64, 32.0] > table[10, 64, 32.0] > table[30, 64, 32.0]


def test_an_arrangement_s_name_says_where_its_ranks_run() -> None:
    hosts, exchanges = Arrangement.parse("hosts:0.3"), Arrangement.parse("exchange:4:16")
    assert (hosts.ranks, hosts.gbit_per_s, hosts.exchanges_only) == (2, 0.3, False)
    assert (exchanges.ranks, exchanges.gbit_per_s, exchanges.exchanges_only) == (4, 16.0, True)
    for name in ("", "hosts", "hosts:x", "alone:2", "exchange:1", "exchange:2:1:1", "nowhere"):
        with pytest.raises(ValueError):
            Arrangement.parse(name)


def test_every_rank_has_as_many_passes_however_many_there_are() -> None:
    work = Work(
        model="tiny",
        data="/data/it's",
        micro_batch_size=2,
        accumulation=4,
        sequence_length=1024,
        dtype="bf16",
        grad_dtype="fp32",
        connections=1,
        steps=3,
    )
    for ranks in (1, 2, 5):
        config = parse_run_config(work.config(ranks), where="test")
        assert config.batch.grad_accum_steps(ranks) == 4
        assert config.data.dir == "/data/it's"


@pytest.mark.slow
@pytest.mark.ranks
def test_two_ranks_exchange_a_step_s_gradients_and_the_runs_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", f"{BIN}{os.pathsep}{os.environ['PATH']}")
    runs = tmp_path / "runs.jsonl"
    words = ["--model", "tiny", "--rounds", "1", "--steps", "2", "--only", "exchange:2"]
    assert main([*words, "--runs", str(runs)]) == 0
    measured = json.loads(capsys.readouterr().out.splitlines()[-1])
    (kept,) = (json.loads(line) for line in runs.read_text().splitlines())
    assert (kept["numbers"], kept["buckets"]) == (NUMBERS, len(TINY))
    assert len(kept["took_s"]) == 2 and min(kept["took_s"]) > 0
    assert measured["fit"].startswith("none: fewer than two")
    # From the file alone, without running anything, the result is the same.
    assert main(["--rounds", "0", "--runs", str(runs)]) == 0
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    changed = {"rounds", "steps", "only", "wall_s"}
    assert {key: again[key] for key in again if key not in changed} == {
        key: measured[key] for key in measured if key not in changed
    }
