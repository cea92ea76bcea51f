"""The tracker that writes event files for TensorBoard, without TensorFlow or torch."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from payload.report.trackers.base import About, Row, Tracker


class TensorboardTracker:
    """Rewrites the event files at each start, so that repeated steps do not appear twice."""

    starts_over: ClassVar[bool] = True

    def __init__(self) -> None:
        self._writer: Any = None

    def start(self, about: About) -> None:
        """Open the event file and write the settings as text."""
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        shutil.rmtree(about.folder, ignore_errors=True)
        about.folder.mkdir(parents=True)
        self._writer = EventFileWriter(str(about.folder))
        self._text("config", dict(about.config))

    def log(self, rows: Sequence[Row]) -> None:
        """Write each number as a scalar at its step."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        for row in rows:
            values = [
                Summary.Value(tag=name, simple_value=value)
                for name, value in row.items()
                if name not in ("step", "time_unix")
            ]
            self._writer.add_event(
                Event(
                    step=int(row["step"]), wall_time=row["time_unix"], summary=Summary(value=values)
                )
            )
        self._writer.flush()

    def end(self, summary: Mapping[str, Any], report: Path | None) -> None:
        """Write the results as text, and close."""
        if summary:
            self._text("summary", {**summary, "report": str(report)})
        self._writer.close()

    def _text(self, name: str, values: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING

        # Four spaces of indentation make a code block in TensorBoard's Markdown.
        lines = [f"    {line}" for line in json.dumps(values, indent=2).splitlines()]
        kind = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        tensor = TensorProto(dtype=DT_STRING, string_val=["\n".join(lines).encode()])
        tensor.tensor_shape.dim.add(size=1)
        value = Summary.Value(tag=name, metadata=kind, tensor=tensor)
        self._writer.add_event(Event(wall_time=time.time(), summary=Summary(value=[value])))


def make() -> Tracker:
    """Return a tracker."""
    return TensorboardTracker()
