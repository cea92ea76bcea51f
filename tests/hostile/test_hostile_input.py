"""All fields of all formats get hostile values, and the bytes of all formats are damaged."""

from __future__ import annotations

import json
import random
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from payload.core.errors import ExitCode, TileforgeError
from payload.core.printable_text import printable
from tests.hostile.cloud_formats import cloud_formats
from tests.hostile.formats import ALL_READS, Format, input_formats, run_formats, text_formats
from tests.hostile.values import HOSTILE, mutated, paths_of, replaced, without

pytestmark = pytest.mark.processes

_SEED = 20261122
_LONGEST_MESSAGE = 2_000
_MORE_MEMORY_BYTES = 4 * 2**30


@pytest.fixture(scope="module")
def formats(
    tmp_path_factory: pytest.TempPathFactory, tiny_config: Path, tiny_data: Path
) -> list[Format]:
    root = tmp_path_factory.mktemp("hostile")
    return [
        *run_formats(root, tiny_config),
        *input_formats(root / "input", tiny_data),
        *text_formats(root / "texts"),
        *cloud_formats(root / "cloud"),
    ]


@pytest.fixture(autouse=True)
def _bounded_memory() -> Iterator[None]:
    """A huge size in a value must be refused, not allocated."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    now_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now_bytes + _MORE_MEMORY_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture(autouse=True)
def _nothing_is_written_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Paths in values point to an empty working folder, which must stay empty."""
    monkeypatch.chdir(tmp_path)
    yield
    assert list(tmp_path.iterdir()) == []
    assert not Path("/tmp/hostile").exists()


def complaint(read: Callable[[bytes], object], content: bytes) -> str | None:
    """Return the problem of `read` with `content`, or None."""
    try:
        read(content)
    except TileforgeError as error:
        words = str(error)
        if error.exit_code in (ExitCode.OK, ExitCode.TEARDOWN) or not words:
            return f"a refusal with code {error.exit_code!r} and {words!r}"
        if words != printable(words) or "\n" in words:
            return f"more than one printable line: {words!r}"
        if len(words) > _LONGEST_MESSAGE:
            return f"a message of {len(words)} characters: {words[:200]}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return None


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_every_field_of_every_format_refuses_hostile_values_in_one_line(
    formats: list[Format], every: int
) -> None:
    problems = []
    for each in formats:
        if not each.sample.startswith(b"{"):
            continue
        # The first of several lines.
        document = json.loads(each.sample.splitlines()[0] if _is_lines(each) else each.sample)
        for number, path in enumerate(paths_of(document)):
            values = HOSTILE[number % every :: every]
            changed = [replaced(document, path, by=value) for value in values]
            for value in [*changed, *([without(document, path)] if path else [])]:
                found = complaint(each.read, json.dumps(value).encode() + b"\n")
                if found:
                    problems.append(f"{each}: {path}: {json.dumps(value)[:100]}: {found}")
    assert problems == []


@pytest.mark.slow
@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("reads", [1_200, pytest.param(ALL_READS, marks=pytest.mark.seeds)])
def test_no_damage_to_any_format_is_a_traceback(formats: list[Format], reads: int) -> None:
    rng = random.Random(_SEED)
    problems = []
    for each in formats:
        assert complaint(each.read, each.sample) is None, each
        most = reads if each.damages is None else each.damages * reads // ALL_READS
        for _ in range(min(most, -(-reads // len(formats)))):
            content = mutated(each.sample, rng)
            found = complaint(each.read, content)
            if found:
                problems.append(f"{each}: {content[:200]!r}: {found}")
    assert problems == []


def _is_lines(each: Format) -> bool:
    return each.name.endswith(".jsonl")
