"""Compares every value on a page with its source file, without the project's own readers."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from payload.run_record.metrics_log import TIMED_PARTS
from tests.support.browser import Browser

_COLLECT = """
return [...document.querySelectorAll('.figure')].map(
    each => ({text: each.textContent, ...each.dataset}));
"""
_UNITS = {
    "GiB": 2**30,
    "MB": 1e6,
    "TFLOP/s": 1e12,
    "%": 0.01,
    "ms": 1e-3,
    "s": 1.0,
    "min": 60.0,
    "h": 3600.0,
}
_UNITS |= {"d": 86400.0}

_DEFAULTS = {"meta.json#task": "text"}
"""Values of keys that may be missing."""


def check_figures(browser: Browser, runs: Path) -> dict[str, str]:
    """Compare all values on the open page; return their texts by run and source."""
    found = {}
    for each in browser.run(_COLLECT):
        folder = Files(runs / each["run"])
        key = each.get("source") or each["derived"]
        if "text_" in each or "value" not in each:
            assert each["text"] == setting_text(folder.value(key)), (key, each)
        else:
            value = json.loads(each["value"])
            expected = folder.value(key) if "source" in each else folder.derived(key)
            if "source" in each:
                assert value == expected, (key, each, expected)
            else:
                assert abs(value - expected) <= 1e-9 * max(1.0, abs(expected)), (key, each)
            assert shows(each["text"], value, source=key), (key, each)
        found[f"{each['run']} {key}"] = each["text"]
    return found


def setting_text(value: object) -> str:
    """Return a setting as the page shows it."""
    if isinstance(value, list):
        return json.dumps(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def shows(text: str, value: object, *, source: str) -> bool:
    """Return True if a text shows this value, rounded to its last digit."""
    if not isinstance(value, int | float):
        return text == str(value)
    read, step = 0.0, 1.0
    found = re.findall(r"(-?[\d,]+)(\.\d+)?(e[+-]?\d+)? ?([A-Za-z/%]*)", text)
    for whole, decimals, power, unit in found:
        scale = 1.0 if source.endswith("memory_gib") else _UNITS.get(unit, 1.0)
        read += float(whole.replace(",", "") + decimals + power) * scale
        step = scale * 10.0 ** (int(power[1:] or 0) - max(0, len(decimals) - 1))
    # Text with two units omits the smaller ones.
    return bool(found) and abs(read - value) <= step * (0.5001 if len(found) == 1 else 1)


class Files:
    """A run folder, read without the project's own readers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
        rows = [json.loads(line) for line in text.splitlines()]
        self.steps = [row for row in rows if "loss" in row]
        self.evaluations = [row for row in rows if "val_loss" in row]

    def json(self, name: str) -> Any:
        """Return a file's values."""
        if name == "run.toml":
            return tomllib.loads((self._folder / name).read_text(encoding="utf-8"))
        if name == "meta.json":
            folder = Path(self.json("run.toml")["data"]["dir"])
            return json.loads((folder / name).read_text(encoding="utf-8"))
        return json.loads((self._folder / name).read_text(encoding="utf-8"))

    def value(self, source: str) -> Any:
        """Return the value of a source such as `summary.json#steps`."""
        name, _, path = source.partition("#")
        if name == "metrics.jsonl":
            *kind, place, key = path.split(".")
            rows = self.evaluations if kind[0] == "evaluations" else self.steps
            if key.isdecimal():  # evaluations.last.val_confusion.ROW.COLUMN
                row, column = int(place), int(key)
                return rows[-1][kind[2]][row][column]
            return rows[0 if place == "first" else -1][key]
        found = self.json(name)
        for index, key in enumerate(path.split(".")):
            if isinstance(found, list):
                found = found[int(key)]
            elif key in found:
                found = found[key]
            elif source in _DEFAULTS:
                return _DEFAULTS[source]
            else:
                # The name of a version can contain dots.
                return found[".".join(path.split(".")[index:])]
        return found

    def derived(self, how: str) -> float:
        """Compute a derived value of the page."""
        kind, _, rest = how.partition(".")
        if kind == "time":
            return self._time()[rest]
        if kind == "ranks":
            part, rank = rest.split(".")
            return self.rank_mean("wait" if part == "waiting" else part, int(rank))
        if how == "perplexity":
            return math.exp(self.evaluations[-1]["val_loss"])
        if how == "store.age_s":
            store = self.json("state.json")["store"]
            return float(store["updated_unix"] - store["sent_unix"])
        numbers = self.json("plan.json")["arithmetic"]
        summary = self.json("summary.json")
        if how == "step_s":
            return float(numbers["tokens_per_step"] / summary["tokens_per_s"])
        if how == "peak_rss":
            return float(max(row["rss_bytes"] for row in self.steps))
        step_s = summary["predicted_step_s"] if kind == "calibration" else numbers["step_s"]
        speed = numbers["tokens_per_step"] / step_s
        hourly = sum(node["hourly_usd"] for node in self.json("inventory.json")["nodes"])
        per_token = hourly / 3600 / speed
        return float(
            {
                "tokens_per_s": speed,
                "usd": per_token * summary["tokens"],
                "usd_per_million_tokens": per_token * 1e6,
            }[rest]
        )

    def rank_mean(self, part: str, rank: int) -> float:
        """Return a rank's mean time in a part, without the first step."""
        assert part in TIMED_PARTS
        times = [row["ranks"] for row in self.steps if row["step"] > 1]
        total = sum(each[part][rank] * each["steps"] for each in times)
        return float(total / sum(each["steps"] for each in times))

    def _time(self) -> Mapping[str, float]:
        whole = sum(row["step_time_s"] for row in self.steps)
        data = sum(row["data_time_s"] for row in self.steps)
        wait = sum(row["sync_time_s"] for row in self.steps)
        start = sum(self.json("summary.json")["start_s"].values())
        spent = self.json("state.json")["spent_s"]
        return {
            "compute": whole - data - wait,
            "wait": wait,
            "data": data,
            "start": start,
            "other": max(0.0, spent - whole - start),
        }


def check_curves(browser: Browser, runs: Path) -> None:
    """Compare each point of the page's curves with its row of metrics.jsonl."""
    data = json.loads(browser.run("return document.getElementById('data').textContent"))
    for run in data["runs"]:
        files = Files(runs / run["id"])
        by_step = {row["step"]: row for row in files.steps}
        columns = run["rows"]
        assert columns["step"][0] == files.steps[0]["step"]
        assert columns["step"][-1] == files.steps[-1]["step"]
        for name, values in columns.items():
            if name not in ("time", "loss_smooth"):
                expected = [by_step[step][name] for step in columns["step"]]
                assert values == expected, name
        losses = {row["step"]: row["val_loss"] for row in files.evaluations}
        shown = dict(zip(run["evaluations"]["step"], run["evaluations"]["val_loss"], strict=True))
        assert shown.items() <= losses.items() and len(shown) >= min(len(losses), 400)
        assert not losses or {max(losses), min(losses, key=lambda s: losses[s])} <= set(shown)
    for heat in data["heat"]:
        files = Files(runs / heat["run"])
        for column, (first, last) in enumerate(zip(heat["first"], heat["last"], strict=True)):
            rows = [row["ranks"] for row in files.steps if first <= row["step"] <= last]
            for rank, shares in enumerate(heat["values"]):
                waited = sum(row["wait"][rank] * row["steps"] for row in rows)
                whole = sum(sum(row[p][rank] for p in TIMED_PARTS) * row["steps"] for row in rows)
                assert abs(shares[column] - waited / whole) < 1e-3
