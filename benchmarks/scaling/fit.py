"""The arithmetic of `benchmarks.scaling`: medians, efficiencies, the fit, predictions."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from payload.estimates.gradient_buckets import buckets
from payload.estimates.network import Network, sends_per_byte
from payload.estimates.step_time import StepTime, step_time
from payload.models.gpt2.spec import PRESETS, Gpt2Spec

Record = Mapping[str, Any]
"""One measurement, as `benchmarks.scaling.runs.measure` returns it."""

PREDICTED_NODES = (3, 16, 64)
PREDICTED_GBIT_PER_S = (10.0, 16.0, 23.0, 32.0)
PREDICTED_DELAY_S = 1e-4
"""Delay of a message in a cloud's network. The measured network, between namespaces of one machine,
has almost no delay."""
PREDICTED_SPEEDS = (1, 10, 30)
"""Speeds of a rank that are predicted, as multiples of this machine's speed."""

# Above this share, the processors are the limit and not the cable.
_MOST_OF_LOOPBACK = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """The fitted constants."""

    link_share: float
    """Share of a cable's rate that is available for gradients."""
    latency_s: float
    """Latency of one round of a ring."""
    loopback_bytes_per_s: float
    """Rate of a rank that sends and receives on one machine with one core."""
    hosts_bytes_per_s: float
    """Rate of a rank between hosts if the cable is not the limit. Packets between hosts are smaller
    than on loopback."""
    busy_s_per_byte: float
    convert_s_per_number: float

    def network(self, *, ranks: int, gbit_per_s: float | None, delay_s: float = 0.0) -> Network:
        """Return the network of `ranks` in a ring, over cables or on one machine."""
        bytes_per_s = self.loopback_bytes_per_s
        if gbit_per_s is not None:
            bytes_per_s = min(self.hosts_bytes_per_s, self.link_share * gbit_per_s * 1e9 / 8)
        return Network(
            ranks=ranks,
            bytes_per_s=bytes_per_s,
            latency_s=self.latency_s + delay_s,
            busy_s_per_byte=self.busy_s_per_byte,
            convert_s_per_number=self.convert_s_per_number,
        )


def step_medians(records: Sequence[Record]) -> dict[str, dict[str, float]]:
    """Return the median step and wait for the exchange of each arrangement.

    On a busy machine, use `best_s`, the shortest step, and `cpu_s`, the median CPU time, which
    excludes waiting for a core or for the network.
    """
    found: dict[str, list[Record]] = {}
    for record in records:
        if "step_s" in record:
            found.setdefault(label(record), []).append(record)
    return {
        name: {
            "step_s": statistics.median(_all(of_name, "step_s")),
            "sync_s": statistics.median(_all(of_name, "sync_s")),
            "best_s": min(_all(of_name, "step_s")),
            "cpu_s": statistics.median(_all(of_name, "cpu_s")),
            "steps": len(_all(of_name, "step_s")),
        }
        for name, of_name in found.items()
    }


def efficiencies(medians: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Return one rank's step time divided by that of two, for each arrangement of two ranks.

    `vs_alone`: the one rank has the machine's memory and cache for itself. `vs_side_by_side`: it
    shares them with another run, so that only the exchange is lost. `best_...` compares the
    shortest steps, `cpu_...` CPU times.
    """
    found: dict[str, dict[str, float]] = {}
    for name, times in medians.items():
        if name in _BASES:
            continue
        for base, key in _BASES.items():
            if base in medians:
                for prefix, kind in (("", "step_s"), ("best_", "best_s"), ("cpu_", "cpu_s")):
                    share = medians[base][kind] / times[kind]
                    found.setdefault(name, {})[prefix + key] = round(share, 4)
    return found


_BASES = {"alone": "vs_alone", "side-by-side": "vs_side_by_side"}


def label(record: Record) -> str:
    """Return the arrangement's name with the settings that are not the default."""
    extra = "+bf16" if record["grad_dtype"] == "bf16" else ""
    several = record["connections"]
    return str(record["arrangement"]) + extra + (f"+{several} connections" if several > 1 else "")


def fit(records: Sequence[Record]) -> Constants:
    """Fit the constants to the exchanges in `records`. Raises ValueError if some are missing.

    An exchange over a slow cable takes `rounds x latency + sends x bytes / (share x rate)`; latency
    and share come from least squares of relative errors. The other constants are medians: of
    exchanges on one machine, and of exchanges over cables that a core cannot fill. The shortest
    round of each exchange counts.
    """
    plain = [record for record in exchanges(records) if record["connections"] == 1]
    here = [each for each in plain if each["gbit_per_s"] is None and each["grad_dtype"] == "fp32"]
    if not here:
        raise ValueError("no exchange on one machine was measured (exchange:2)")
    rough = statistics.median(_sent_bytes(each) / _took_s(each) for each in here)
    cables = [each for each in plain if each["gbit_per_s"] is not None]
    limited = [each for each in cables if _rate(each) < _MOST_OF_LOOPBACK * rough]
    if len(limited) < 2:
        raise ValueError("fewer than two exchanges over slow cables were measured (exchange:2:1)")
    latency_s, per_share = _least_squares(
        [(_rounds(each) / _took_s(each), _ideal_s(each) / _took_s(each)) for each in limited]
    )
    latency_s = max(0.0, latency_s)
    unfilled = [each for each in cables if _rate(each) > rough and each["grad_dtype"] == "fp32"]
    converted = [each["convert_s"] / each["numbers"] for each in exchanges(records)]
    return Constants(
        link_share=1 / per_share,
        latency_s=latency_s,
        loopback_bytes_per_s=_median_speed(here, latency_s),
        hosts_bytes_per_s=_median_speed(unfilled or here, latency_s),
        busy_s_per_byte=statistics.median(min(each["cpu_s"]) / _sent_bytes(each) for each in here),
        convert_s_per_number=statistics.median(converted),
    )


def exchanges(records: Sequence[Record]) -> list[Record]:
    """Return the records of exchanges without training."""
    return [record for record in records if "took_s" in record]


def points(records: Sequence[Record], constants: Constants) -> list[dict[str, Any]]:
    """Return every measured point with the model's prediction and its relative error.

    A step's computing time is the CPU time of `side-by-side` runs, which also share the memory. On
    one core it equals the wall time if no other program runs.
    """
    found: list[dict[str, Any]] = []
    for name, of_name in _by_label(exchanges(records)).items():
        network = constants.network(ranks=of_name[0]["ranks"], gbit_per_s=of_name[0]["gbit_per_s"])
        per_bucket = _bytes(of_name[0]) / of_name[0]["buckets"]
        predicted = of_name[0]["buckets"] * network.all_reduce_s(per_bucket)
        measured = min(_all(of_name, "took_s"))
        found.append(_point(name, "exchange_s", measured=measured, predicted=predicted))
    medians = step_medians(records)
    compute_s = medians.get("side-by-side", {}).get("cpu_s")
    if compute_s is None:
        return found
    for name, of_name in _by_label([each for each in records if "step_s" in each]).items():
        if of_name[0]["ranks"] == 1:
            continue
        step = _step(of_name[0], constants, compute_s=compute_s)
        split = buckets(spec_of(of_name[0]), tokens=_tokens(of_name[0]))
        numbers = sum(bucket.elements for bucket in split)
        sent = sends_per_byte(of_name[0]["ranks"]) * numbers * _number_bytes(of_name[0])
        predicted_s = {
            "step_s": step.total_s(),
            "best_s": step.total_s(),
            "sync_s": step.exposed_s,
            "cpu_s": compute_s + sent * constants.busy_s_per_byte,
        }
        found += [
            _point(name, key, measured=medians[name][key], predicted=seconds)
            for key, seconds in predicted_s.items()
        ]
    return found


def predictions(records: Sequence[Record], constants: Constants) -> list[dict[str, Any]]:
    """Return predicted steps of one rank per node at the documented bandwidths and higher speeds.

    A node exchanges like a rank on one machine. The measured hosts also share their cores with the
    switch.
    """
    side_by_side = [record for record in records if record["arrangement"] == "side-by-side"]
    if not side_by_side:
        return []
    compute_s = step_medians(side_by_side)["side-by-side"]["cpu_s"]
    work = side_by_side[0]
    own = replace(constants, hosts_bytes_per_s=constants.loopback_bytes_per_s)
    found = []
    for faster in PREDICTED_SPEEDS:
        for dtype in ("fp32", "bf16"):
            for nodes in PREDICTED_NODES:
                for gbit in PREDICTED_GBIT_PER_S:
                    record = {**work, "ranks": nodes, "gbit_per_s": gbit, "grad_dtype": dtype}
                    step = _step(
                        record,
                        own,
                        compute_s=compute_s / faster,
                        delay_s=PREDICTED_DELAY_S,
                        faster=faster,
                    )
                    found.append(
                        {
                            "computes_times_as_fast": faster,
                            "grad_dtype": dtype,
                            "nodes": nodes,
                            "gbit_per_s": gbit,
                            **{key: round(value, 4) for key, value in asdict(step).items()},
                            "step_s": round(step.total_s(), 4),
                            "efficiency": round(step.efficiency(), 4),
                        }
                    )
    return found


def spec_of(record: Record) -> Gpt2Spec:
    """Return the spec of the trained model."""
    return replace(PRESETS[record["model"]], sequence_length=record["sequence_length"])


def _step(
    record: Record,
    constants: Constants,
    *,
    compute_s: float,
    delay_s: float = 0.0,
    faster: float = 1.0,
) -> StepTime:
    """Predict a step; on `faster` processors the exchange's own work also takes less time."""
    own = replace(
        constants,
        hosts_bytes_per_s=constants.hosts_bytes_per_s * faster,
        busy_s_per_byte=constants.busy_s_per_byte / faster,
        convert_s_per_number=constants.convert_s_per_number / faster,
    )
    return step_time(
        spec_of(record),
        compute_s=compute_s,
        accumulation=record["accumulation"],
        bytes_per_number=_number_bytes(record),
        network=own.network(
            ranks=record["ranks"], gbit_per_s=record["gbit_per_s"], delay_s=delay_s
        ),
        tokens=_tokens(record),
    )


def _tokens(record: Record) -> int:
    """Return the tokens of a micro-batch on all ranks."""
    return int(record["ranks"] * record["micro_batch_size"] * record["sequence_length"])


def _point(name: str, quantity: str, *, measured: float, predicted: float) -> dict[str, Any]:
    return {
        "point": name,
        "what": quantity,
        "measured": round(measured, 4),
        "predicted": round(predicted, 4),
        "error": round(predicted / measured - 1, 4) if measured else None,
    }


def _by_label(records: Sequence[Record]) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(label(record), []).append(record)
    return found


def _all(records: Sequence[Record], key: str) -> list[float]:
    return [value for record in records for value in record[key]]


def _took_s(record: Record) -> float:
    """Return the shortest round, which other work disturbed least."""
    return float(min(record["took_s"]))


def _rate(record: Record) -> float:
    """Return the cable's rate in bytes a second."""
    return float(record["gbit_per_s"]) * 1e9 / 8


def _median_speed(records: Sequence[Record], latency_s: float) -> float:
    return statistics.median(
        _sent_bytes(each) / (_took_s(each) - _rounds(each) * latency_s) for each in records
    )


def _number_bytes(record: Record) -> int:
    return 2 if record["grad_dtype"] == "bf16" else 4


def _bytes(record: Record) -> int:
    return int(record["numbers"]) * _number_bytes(record)


def _sent_bytes(record: Record) -> float:
    return sends_per_byte(record["ranks"]) * _bytes(record)


def _rounds(record: Record) -> int:
    """Return the ring's rounds over all buckets."""
    return int(record["buckets"]) * 2 * (int(record["ranks"]) - 1)


def _ideal_s(record: Record) -> float:
    """Return the time over the cable at its full rate without latency, in seconds."""
    return _sent_bytes(record) / _rate(record)


def _least_squares(rows: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return (x, y) with x a + y b closest to 1 over all rows (a, b)."""
    aa, ab, bb = (
        sum(a * a for a, _ in rows),
        sum(a * b for a, b in rows),
        sum(b * b for _, b in rows),
    )
    to_a, to_b = sum(a for a, _ in rows), sum(b for _, b in rows)
    determinant = aa * bb - ab * ab
    if determinant <= 1e-12 * aa * bb:
        # All rows are proportional and only determine the rate.
        return 0.0, to_b / bb
    return (to_a * bb - to_b * ab) / determinant, (to_b * aa - to_a * ab) / determinant
