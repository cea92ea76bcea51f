"""Worker process that reads parquet and Arrow files for its parent.

A damaged footer can make Arrow abort the process, so files are read in a separate process. This
file is run as a script and has no imports from the project.

Requests are JSON lines on stdin. Responses are frames on stdout. A frame consists of a letter, the
length of the content in eight bytes, and the content. With the letter `J`, the content is a JSON
object; with `A`, it is an Arrow stream with one batch. The last frame of a response is a JSON
object with the key `end`.
"""

from __future__ import annotations

import json
import resource
import signal
import struct
import sys
from typing import Any

HEADER = struct.Struct(">cQ")
_MEMORY_BYTES = 8 * 2**30
_PIECE_BYTES = 64 * 2**20


def main() -> None:
    """Serve requests until stdin is closed."""
    # Limit the memory, because a small file can decompress to any size.
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = _MEMORY_BYTES if most == resource.RLIM_INFINITY else min(_MEMORY_BYTES, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))
    # Ctrl-C is handled by the parent; stdin is closed when the parent ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        try:
            answer = _survey(request) if request["do"] == "survey" else _read(request)
            _send_json({"end": True, **answer})
        except BrokenPipeError:
            return
        except Exception as error:
            _send_json(_failure_response(error, is_remote="://" in request["place"]))


def _survey(request: dict[str, Any]) -> dict[str, Any]:
    """Send the schema; return the number of rows and the uncompressed size of the column.

    The size of a dictionary-encoded column is smaller than the size of its text.
    """
    with _open(request) as file:
        _send_schema(file.schema_arrow)
        groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
        column_bytes = 0
        for group in groups:
            for index in range(file.metadata.num_columns):
                entry = group.column(index)
                if entry.path_in_schema == request["column"]:
                    column_bytes += max(0, entry.total_uncompressed_size)
        rows = file.metadata.num_rows
        if rows < 0 or rows != sum(max(0, group.num_rows) for group in groups):
            raise ValueError("the row counts of its row groups do not add up")
    return {"rows": rows, "bytes": column_bytes}


def _read(request: dict[str, Any]) -> dict[str, Any]:
    """Send the schema, then the column from row `skip_rows` on. Damaged rows are reported as lost.

    Without `column`, sends all columns. An Arrow file is always sent whole.
    """
    import pyarrow as pa

    if "://" not in request["place"] and (reader := _arrow_reader(request["place"])) is not None:
        _send_schema(reader.schema)
        for batch in reader:
            for start in range(0, batch.num_rows, request["rows"]):
                _send_rows(batch.slice(start, request["rows"]), whole=True)
        return {}
    column, skip_rows = request["column"], request["skip_rows"]
    columns = None if column is None else [column]
    is_remote = "://" in request["place"]
    with _open(request) as file:
        _send_schema(file.schema_arrow)
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if skip_rows >= rows:
                skip_rows -= rows
                continue
            reached = 0
            try:
                batches = file.iter_batches(request["rows"], row_groups=[group], columns=columns)
                for batch in batches:
                    dropped = min(max(0, skip_rows - reached), batch.num_rows)
                    reached += batch.num_rows
                    if dropped < batch.num_rows:
                        _send_rows(batch.slice(dropped), whole=column is None)
            except BrokenPipeError:
                raise
            except Exception as error:
                if is_remote and not isinstance(error, pa.ArrowException):
                    raise
                lost = max(0, rows - max(reached, skip_rows))
                _send_json({"lost": lost, "reason": f"damaged: {_first_line(error)}"})
            skip_rows = 0
    return {}


def _arrow_reader(place: str) -> Any:
    """Return an iterator over the batches of an Arrow file or stream, or None."""
    import pyarrow as pa

    source = pa.memory_map(place)
    start = source.read(6)
    source.seek(0)
    if start.startswith(b"\xff\xff\xff\xff"):
        return pa.ipc.open_stream(source)
    if start != b"ARROW1":
        return None
    file = pa.ipc.open_file(source)
    return pa.RecordBatchReader.from_batches(
        file.schema, map(file.get_batch, range(file.num_record_batches))
    )


def _send_rows(batch: Any, *, whole: bool) -> None:
    """Send rows, with dictionaries decoded. Unreadable rows are reported as lost.

    `whole` is True if all columns are sent. The parent then converts the values to Python objects.
    """
    if batch.num_rows > 1 and _decoded_bytes(batch) > _PIECE_BYTES:
        half = batch.num_rows // 2
        _send_rows(batch.slice(0, half), whole=whole)
        _send_rows(batch.slice(half), whole=whole)
        return
    try:
        batch = _decoded(batch)
        if whole:
            batch.to_pylist()
    except Exception as error:
        # For example a date outside of Python's range, or a value larger than memory.
        if batch.num_rows > 1:
            for row in range(batch.num_rows):
                _send_rows(batch.slice(row, 1), whole=whole)
        else:
            _send_json({"lost": 1, "reason": f"cannot be read: {_first_line(error)}"})
        return
    _send_batch(batch)


def _decoded_bytes(batch: Any) -> int:
    """Return the size in bytes that a batch has once its dictionaries are decoded."""
    import pyarrow as pa
    import pyarrow.compute as pc

    size = batch.nbytes
    for column in batch.columns:
        if pa.types.is_dictionary(column.type) and _is_text(column.type.value_type):
            lengths = pc.binary_length(column.dictionary).take(column.indices)
            size += pc.sum(lengths).as_py() or 0
    return int(size)


def _decoded(batch: Any) -> Any:
    import pyarrow as pa

    columns = [
        column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column
        for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary)
    return any(test(kind) for test in (*tests, pa.types.is_large_binary))


def _open(request: dict[str, Any]) -> Any:
    import pyarrow.parquet as pq

    source = request["place"]
    if "://" in source:
        import fsspec

        source = fsspec.open(source, "rb").open()
    # Without pre_buffer a row group is read page by page, whatever its size.
    return pq.ParquetFile(source, pre_buffer=False, buffer_size=request["buffer_bytes"])


def _failure_response(error: Exception, *, is_remote: bool) -> dict[str, Any]:
    import pyarrow as pa

    # pyarrow also raises OSError for a bad footer, but without an errno.
    of_system = isinstance(error, OSError) and (is_remote or error.errno is not None)
    outside = of_system or (is_remote and not isinstance(error, pa.ArrowException))
    types: set[str] = set()
    cause: BaseException | None = error
    while cause is not None and len(types) < 100:
        types |= {each.__name__ for each in type(cause).__mro__}
        cause = cause.__cause__ or cause.__context__
    return {
        "end": True,
        "failed": "system" if outside else "damaged",
        "reason": _first_line(error),
        "errno": error.errno if isinstance(error, OSError) else None,
        "types": sorted(types),
    }


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).rstrip(".") + "."


def _send_schema(schema: Any) -> None:
    import pyarrow as pa

    schema = schema.remove_metadata()
    names = schema.names  # raises if a name is not UTF-8
    if len(set(names)) < len(names):
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two of its columns are named {repeated!r}")
    _send_batch(pa.RecordBatch.from_pylist([], schema=schema))


def _send_batch(batch: Any) -> None:
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    _send(b"A", sink.getvalue())


def _send_json(value: dict[str, Any]) -> None:
    _send(b"J", json.dumps(value).encode())


def _send(kind: bytes, content: Any) -> None:
    out = sys.stdout.buffer
    out.write(HEADER.pack(kind, len(content)))
    out.write(content)
    out.flush()


if __name__ == "__main__":
    main()
