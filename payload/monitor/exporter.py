"""`python -m payload.monitor.exporter --run-dir RUN`: serve a run's metrics to Prometheus.

The supervisor also serves the metrics, in a thread, if the run's [monitor] section enables this.
The server listens only on 127.0.0.1. No other module imports prometheus_client.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from payload.config.launch_sections import MonitorSection
from payload.core.errors import PreflightError, TileforgeError
from payload.core.suggested_commands import command
from payload.monitor.run_metrics import RunMetrics, by_metric
from payload.run_record.run_files import RunPaths
from payload.run_record.run_repair import known_config
from payload.stack.node_paths import MONITORING_FOLDER

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from prometheus_client.core import GaugeMetricFamily

ADDRESS = "127.0.0.1"
SET_UP = Path(MONITORING_FOLDER)
"""Folder that exists on the head if node-setup.sh has installed Prometheus."""


class RunCollector:
    """A collector for prometheus_client that reads the run's records at every scrape."""

    def __init__(self, paths: RunPaths) -> None:
        self._metrics = RunMetrics(paths)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield a metric family for each metric that has a value now."""
        from prometheus_client.core import GaugeMetricFamily

        for metric, samples in by_metric(self._metrics.samples()):
            family = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
            for sample in samples:
                family.add_metric([sample.labels[name] for name in metric.labels], sample.value)
            yield family


@contextmanager
def serving(paths: RunPaths, *, port: int) -> Iterator[int]:
    """Serve the run's metrics within the block and yield the port; `port=0` selects a free port.

    Raises PreflightError if the port is in use or prometheus_client is not installed.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError:
        raise PreflightError(
            "the package prometheus_client is not installed. Install it with: pip install "
            "prometheus-client"
        ) from None
    registry = CollectorRegistry()
    registry.register(RunCollector(paths))
    try:
        server, thread = start_http_server(port, addr=ADDRESS, registry=registry)
    except OSError as error:
        raise PreflightError(
            f"cannot listen on {ADDRESS}:{port} ({error.strerror}). Choose another monitor.port."
        ) from None
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def write_history(paths: RunPaths, file: TextIO) -> None:
    """Write the rows of metrics.jsonl as OpenMetrics text, for a backfill of Prometheus.

    Format: https://prometheus.io/docs/prometheus/latest/storage/#backfilling-from-openmetrics-format
    """
    for metric, samples in by_metric(RunMetrics(paths).history()):
        file.write(f"# HELP {metric.name} {metric.help}\n# TYPE {metric.name} gauge\n")
        for sample in samples:
            pairs = {"job": "tileforge", "instance": "run", **sample.labels}
            labels = ",".join(f'{name}="{_escaped(value)}"' for name, value in pairs.items())
            file.write(f"{metric.name}{{{labels}}} {sample.value!r} {sample.time_unix!r}\n")
    file.write("# EOF\n")


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def is_enabled(monitor: MonitorSection) -> bool:
    """Return True if a run on this node serves its metrics."""
    return monitor.enabled == "on" or (monitor.enabled == "auto" and SET_UP.exists())


@contextmanager
def monitored(paths: RunPaths, *, note: Callable[[str], None]) -> Iterator[None]:
    """Serve the run's metrics within the block if its settings enable it.

    A failure is only reported as a note, so that monitoring never ends a run.
    """
    monitor = known_config(paths).monitor
    served: AbstractContextManager[object] = nullcontext()
    if is_enabled(monitor):
        served = serving(paths, port=monitor.port)
        try:
            served.__enter__()
        except TileforgeError as error:
            note(f"note: no metrics are served to Prometheus: {error}")
            served = nullcontext()
    try:
        yield
    finally:
        served.__exit__(None, None, None)


def main(argv: Sequence[str]) -> int:
    """Serve metrics until stdin is closed, as when the parent process ends."""
    arguments = parser().parse_args(argv)
    if arguments.history:
        write_history(RunPaths(arguments.run_dir.resolve()), sys.stdout)
        return 0
    try:
        with serving(RunPaths(arguments.run_dir.resolve()), port=arguments.port) as port:
            sys.stdout.write(f"http://{ADDRESS}:{port}/metrics\n")
            sys.stdout.flush()
            sys.stdin.buffer.read()
    except TileforgeError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        pass
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command-line options."""
    made = argparse.ArgumentParser(
        prog=command("monitor.exporter"),
        description="Serve a run's metrics to Prometheus on 127.0.0.1 until stdin is closed. "
        "Prints the address.",
    )
    made.add_argument("--run-dir", type=Path, required=True, metavar="DIR", help="the run's folder")
    made.add_argument(
        "--history",
        action="store_true",
        help="print the history of the run as OpenMetrics text and exit",
    )
    made.add_argument(
        "--port", type=int, default=0, metavar="N", help="port to listen on (default: a free port)"
    )
    return made


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
