"""Test helpers: queries to Prometheus, its configuration, and the panels of the dashboards."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from payload.monitor.local import FILES
from payload.run_record.run_files import RunPaths
from tests.support.waiting import DEADLINE_S

DASHBOARDS = sorted((FILES / "dashboards").glob("*.json"))
SHORT_S = 5

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """A run and the Prometheus that scrapes it."""

    url: str
    paths: RunPaths
    pids: Sequence[int]
    """Process ids of the ranks' trainers."""

    def get(self, path: str, **parameters: str | float) -> Any:
        """Return the data of a response of Prometheus's HTTP API."""
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(
            f"{self.url}/api/v1/{path}?{query}", timeout=DEADLINE_S
        ) as answer:
            found = json.load(answer)
        assert found["status"] == "success"
        return found["data"]

    def now(self, expression: str) -> list[Json]:
        """Return the current values of an expression."""
        found: list[Json] = self.get("query", query=expression)["result"]
        return found

    def lately(self, expression: str, *, seconds: float = 60.0) -> list[Json]:
        """Return the time series of an expression over the last `seconds`."""
        end = time.time()
        found: list[Json] = self.get(
            "query_range", query=expression, start=end - seconds, end=end, step=1
        )["result"]
        return found

    def firing(self) -> set[str]:
        """Return the names of the alerts that fire now."""
        alerts = self.get("alerts")["alerts"]
        return {each["labels"]["alertname"] for each in alerts if each["state"] == "firing"}


def short_thresholds(files: Path, *, gpus: str) -> None:
    """Copy the configuration to `files`, with alerts that fire after seconds."""
    shutil.copytree(FILES, files)
    path = files / "alerts.yml"
    rules = yaml.safe_load(path.read_text(encoding="utf-8"))
    for rule in (rule for group in rules["groups"] for rule in group["rules"]):
        rule["expr"] = rule["expr"].replace("600", str(SHORT_S))
        rule.pop("for", None)
    path.write_text(yaml.safe_dump(rules), encoding="utf-8")
    config = files / "prometheus.yml"
    text = config.read_text(encoding="utf-8").replace("interval: 5s", "interval: 1s")
    config.write_text(text.replace("scrape_timeout: 4s", "scrape_timeout: 1s"), encoding="utf-8")
    (files / "targets").mkdir()
    target = [{"targets": [gpus], "labels": {"node": "gpu-node"}}]
    (files / "targets" / "gpus.json").write_text(json.dumps(target), encoding="utf-8")


class Gpus:
    """A fake of NVIDIA's DCGM exporter with one GPU."""

    _TEXT = "".join(
        f'# TYPE {name} gauge\n{name}{{gpu="0",UUID="GPU-1",modelName="none"}} {value}\n'
        for name, value in (
            ("DCGM_FI_DEV_GPU_UTIL", 97),
            ("DCGM_FI_DEV_FB_USED", 40_000),
            ("DCGM_FI_DEV_POWER_USAGE", 350.5),
            ("DCGM_FI_DEV_GPU_TEMP", 61),
        )
    )

    def __enter__(self) -> Self:
        text = self._TEXT.encode()

        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:  # http.server's name
                # Prometheus has closed the connection if the answer was too late.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    self.send_response(200)
                    self.send_header("Content-Type", "text/plain; version=0.0.4")
                    self.end_headers()
                    self.wfile.write(text)

            def log_message(self, *_: object) -> None:
                """Log nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        self.address = f"127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(
            target=lambda: self._server.serve_forever(poll_interval=0.02)
        )
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def panels() -> Iterator[tuple[str, Json]]:
    """Yield every panel with its name, such as `run: Loss`."""
    for path in DASHBOARDS:
        for panel in load(path)["panels"]:
            yield f"{path.stem}: {panel['title']}", panel


def load(path: Path) -> Json:
    """Return a dashboard."""
    found: Json = json.loads(path.read_text(encoding="utf-8"))
    return found


def filled_in(text: str, *, run: str) -> str:
    """Return a query with the dashboards' variables replaced, as Grafana does it."""
    for name, value in (("run", run), ("rank", "1"), ("node", ".*")):
        text = text.replace(f"${name}", value)
    return text
