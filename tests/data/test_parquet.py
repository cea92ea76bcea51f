"""Damaged parquet files cause a clear error or are read, and never crash the process."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from payload.core.errors import DataError, ExitCode
from payload.data.__main__ import main
from payload.data.sources.parquet import DamagedFileError, LostRows, ParquetReader

pytestmark = pytest.mark.processes

TEXTS = [f"document {i} hello" for i in range(50)]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parquet") / "good.parquet"
    pq.write_table(pa.table({"text": TEXTS, "n": list(range(50))}), path)
    return path


def footer_bits(path: Path) -> range:
    """Return every bit of the footer, whose length is in the four bytes before the last four."""
    content = path.read_bytes()
    size = int.from_bytes(content[-8:-4], "little")
    return range((len(content) - 8 - size) * 8, len(content) * 8)


def flipped(path: Path, bit: int, target: Path) -> Path:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    target.write_bytes(content)
    return target


def outcome(reader: ParquetReader, place: Path) -> str:
    """Survey and read a file, and return the outcome. Any other exception fails the test."""
    try:
        rows, size = reader.survey(str(place))
        assert rows >= 0 and size >= 0
        for values in reader.read(str(place), skip_rows=0):
            assert isinstance(values, LostRows) or values.type in (pa.string(), pa.large_string())
    except DamagedFileError as error:
        assert str(error).startswith(f"{place}: not a readable parquet or Arrow file: ")
        assert "\n" not in str(error)
        return "ended" if "the process that read it ended with SIG" in str(error) else "damaged"
    except DataError:
        return "another column"
    return "read"


@pytest.mark.slow
@pytest.mark.parametrize("every", [24, 8])
def test_a_flipped_bit_of_a_footer_is_a_clean_error_or_a_good_read(
    every: int, good: Path, tmp_path: Path
) -> None:
    """Arrow 26 aborts for one in two hundred of these bits, in std::vector or in thrift."""
    seen: dict[str, int] = {}
    deadly = None
    with ParquetReader("text") as reader:
        for bit in footer_bits(good)[::every]:
            place = flipped(good, bit, tmp_path / "in.parquet")
            how = outcome(reader, place)
            seen[how] = seen.get(how, 0) + 1
            deadly = bit if how == "ended" else deadly
        assert outcome(reader, good) == "read"
    assert seen["damaged"] > 50 and seen["read"] > 50
    assert deadly is not None, "no bit ends the reader any more: is the process of its own needed?"
    place = flipped(good, deadly, tmp_path / "in.parquet")
    command = ["prepare", "--source", "parquet", "--input", str(good), str(place), "--out"]
    assert main([*command, str(tmp_path / "out")]) == ExitCode.CONFIG
    assert main([*command, str(tmp_path / "out"), "--skip-bad"]) == ExitCode.OK


def test_a_bit_flipped_in_the_data_is_a_clean_error_or_a_good_read(
    good: Path, tmp_path: Path
) -> None:
    with ParquetReader("text") as reader:
        for bit in range(0, footer_bits(good).start, 29):
            outcome(reader, flipped(good, bit, tmp_path / "in.parquet"))


def test_the_reading_process_ends_with_its_reader_also_in_the_middle_of_a_file(
    good: Path,
) -> None:
    with ParquetReader("text") as reader:
        rows = reader.read(str(good), skip_rows=10)
        assert len(next(rows)) == 40
        worker = reader._worker
        assert worker is not None and worker.poll() is None
    assert worker.poll() is not None


@pytest.mark.parametrize("failed", ["damaged", "system"])
def test_what_arrow_says_in_many_lines_is_one_short_line(
    failed: str, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrow's message can quote the file, so a fake worker process returns a long message."""
    said = "Couldn't deserialize thrift\x1b[2J\r\n" + "x" * 20_000
    answer = {"end": True, "failed": failed, "reason": said, "errno": None, "types": []}
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import json, struct, sys\n"
        "sys.stdin.buffer.readline()\n"
        f"content = json.dumps({answer!r}).encode()\n"
        "sys.stdout.buffer.write(struct.pack('>cQ', b'J', len(content)) + content)\n"
    )
    monkeypatch.setattr("payload.data.sources.parquet._WORKER", worker)
    with ParquetReader("text") as reader, pytest.raises((DamagedFileError, OSError)) as raised:
        reader.survey(str(good))
    text = str(raised.value).removesuffix(" Write the file again.")
    assert text.endswith("Couldn't deserialize thrift.") and text.isprintable()


UNREADABLE = {
    "a day in the year 5,881,580": pa.array([1, 2**31 - 1, 3], pa.date32()),
    "a time of day beyond the day": pa.array([1, 2**62, 3], pa.time64("us")),
    "a time in the year 292,277": pa.array([1, 2**62, 3], pa.timestamp("us")),
}


@pytest.mark.parametrize("column", UNREADABLE.values(), ids=UNREADABLE)
def test_a_time_that_python_does_not_know_loses_its_row_alone(
    column: pa.Array, tmp_path: Path
) -> None:
    place = tmp_path / "times.parquet"
    pq.write_table(pa.table({"text": ["a", "b", "c"], "when": column}), place)
    with ParquetReader(None) as reader:
        first, lost, last = reader.read_rows(str(place))
    assert isinstance(first, list) and isinstance(last, list)
    assert (first[0]["text"], last[0]["text"]) == ("a", "c")
    assert isinstance(lost, LostRows) and lost.count == 1
    assert lost.reason.startswith("cannot be read: ") and "\n" not in lost.reason


@pytest.mark.parametrize("column", ["text", None])
def test_two_columns_of_one_name_are_refused(column: str | None, tmp_path: Path) -> None:
    place = tmp_path / "twice.parquet"
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(table, place)
    with (
        ParquetReader(column) as reader,
        pytest.raises(DamagedFileError, match="two of its columns are named 'text'"),
    ):
        list(reader.read(str(place), skip_rows=0) if column else reader.read_rows(str(place)))


def test_an_unknown_time_zone_loses_rows_and_raises_nothing(tmp_path: Path) -> None:
    place = tmp_path / "zone.parquet"
    when = pa.array([1, 2], pa.timestamp("us", tz="Mars/Olympus"))
    pq.write_table(pa.table({"text": ["a", "b"], "when": when}), place)
    with ParquetReader(None) as reader:
        found = list(reader.read_rows(str(place)))
    assert all(isinstance(each, LostRows) for each in found)
    assert sum(len(each) for each in found) == 2


@pytest.mark.slow
def test_a_small_file_of_large_texts_comes_in_pieces(tmp_path: Path) -> None:
    place, text = tmp_path / "dictionary.parquet", "x" * 400_000
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 1000, pa.int32()), [text])
    pq.write_table(pa.table({"text": column}), place, compression="zstd")
    assert place.stat().st_size < 10_000
    with ParquetReader("text") as reader:
        found = list(reader.read(str(place), skip_rows=10))
    pieces = [each for each in found if not isinstance(each, LostRows)]
    assert len(pieces) == len(found) and sum(map(len, pieces)) == 990
    assert all(each.type == pa.string() and each.nbytes <= 64 * 2**20 for each in pieces)
    with ParquetReader(None) as reader:
        assert max(len(each) for each in reader.read_rows(str(place))) <= 168
