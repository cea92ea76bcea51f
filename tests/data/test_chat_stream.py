"""`prepare --task chat` as a stream: equal bytes, killed runs, bounded memory, slow templates."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from payload.core.errors import ExitCode
from payload.data.__main__ import main, parser
from payload.data.rows.rows import Row, Rows
from payload.data.sources.documents import UnreachableSourceError
from payload.data.tasks.chat_job import chat_job
from payload.data.tasks.sample_files import SampleFiles
from payload.data.tasks.whole_folder_writer import estimate_whole
from payload.data.templates import template_process
from payload.data.writing.encoder_choice import (
    Encoded,
    EncoderMismatchError,
    GigatokenEncoder,
)
from payload.data.writing.resumable_token_files import JOURNAL_NAME, ResumableTokenFiles
from payload.formats.data_folder import load_meta
from tests.data.running import REPOSITORY, contents, data_command, environment
from tests.support.chat_data import (
    MARKED_TEMPLATE,
    PLAIN_TEMPLATE,
    conversations,
    make_tokenizer,
    prepare,
    prepare_words,
    turn,
    write_rows,
)
from tests.support.mixed_rows import CASES, FLAGS, digests, write_mixed
from tests.support.sampled import sampled

pytestmark = pytest.mark.processes  # a process renders the template

GOLDEN = Path(__file__).with_name("chat_folders.json")
"""Digests of the folders that were made in memory, before conversations were a stream."""
BATCH = "payload.data.tasks.chat_reader._BATCH_SIZE"
SHARD_MIB = 1
_PEAK = (
    "import resource, sys; from payload.data.__main__ import main; status = main(sys.argv[1:]); "
    "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss); sys.exit(status)"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


# A round trip for each row is tried with one case.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "size"),
    sampled(
        (("best-fit", 1), *itertools.product(CASES, (7, 256, 5000))),
        sample=(("best-fit", 1), *((case, 7) for case in CASES), ("groups", 256), ("drop", 5000)),
    ),
)
def test_every_batch_size_gives_the_bytes_of_older_releases(
    case: str, size: int, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BATCH, size)
    monkeypatch.setattr("payload.data.tasks.sample_files._CHUNK_TOKENS", 10 * size)
    source = write_mixed(tmp_path / "in", case)
    out = prepare(tokenizer, source, tmp_path / "out", *FLAGS, *CASES[case])
    expected = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert digests(out) == expected[f"{case}, plain"]
    examples = load_meta(out).skipped_examples
    lines = [int(each.partition(" line ")[2].partition(":")[0]) for each in examples]
    assert lines == sorted(lines) and len(lines) == 20


@pytest.mark.parametrize("case", ["best-fit", "drop"])
def test_a_template_with_blocks_gives_the_bytes_of_older_releases(
    case: str, tmp_path: Path
) -> None:
    marked = make_tokenizer(tmp_path / "marked", template=MARKED_TEMPLATE)
    source = write_mixed(tmp_path / "in", case)
    out = prepare(marked, source, tmp_path / "out", *FLAGS, *CASES[case])
    expected = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert digests(out) == expected[f"{case}, marked"]


def long_rows(path: Path, *, count: int = 1200) -> Path:
    """Write rows of about 1,000 tokens, with groups, bad rows and rows that are left out.

    A shard has about 260 rows.
    """
    rows: list[dict[str, Any]] = []
    for number, messages in enumerate(conversations(count)):
        messages[1]["content"] += " word list" * 500
        row: dict[str, Any] = {"messages": messages, "topic": f"t\ud800{number % 40}", "id": number}
        if number % 9 == 2:
            row["weight"] = 0
        if number % 10 == 3:
            messages[0]["role"] = "nobody"
        rows.append(row)
    return write_rows(path, rows)


def long_words(tokenizer: Path, source: Path, out: Path, *flags: object) -> list[str]:
    more = ("--skip-bad", "--group-column", "topic", "--val-fraction", 0.2)
    return prepare_words(tokenizer, source, out, *more, "--shard-mib", SHARD_MIB, *flags)


def num_shards(out: Path) -> int:
    journal = out / JOURNAL_NAME
    return journal.read_bytes().count(b"\n") - 1 if journal.exists() else 0


@pytest.mark.slow
def test_a_killed_run_resumes_and_ends_with_the_same_bytes(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = long_rows(tmp_path / "in.jsonl")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert main(long_words(tokenizer, source, whole)) == ExitCode.OK
    assert load_meta(whole).skipped_documents == 107
    shards = [0]
    for _ in range(3):
        killed = subprocess.Popen(
            data_command(*long_words(tokenizer, source, broken)),
            cwd=REPOSITORY,
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while num_shards(broken) <= shards[-1]:
            assert killed.poll() is None, "it was to be killed before its end"
            time.sleep(0.002)
        killed.kill()
        killed.wait()
        shards.append(num_shards(broken))
        assert not (broken / "meta.json").exists()
    assert shards == sorted(set(shards))

    for changed in (("--seed", 1), ("--on-long", "drop"), ("--max-documents", 900)):
        capsys.readouterr()
        assert main(long_words(tokenizer, source, broken, *changed)) == ExitCode.CONFIG
        assert "holds an unfinished run with another source" in capsys.readouterr().err
    words = [each for each in long_words(tokenizer, source, broken) if each != "--quiet"]
    assert main(words) == ExitCode.OK
    assert "resuming after" in capsys.readouterr().err
    assert contents(broken) == contents(whole)


class Killed(BaseException):
    """Ends a run at a chosen place."""


def kill_before_packing(words: list[str]) -> None:
    """Start a run that ends after its last row."""

    def killed(*_: object, **__: object) -> None:
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SampleFiles, "packed", killed)
        with pytest.raises(Killed):
            main(words)


@pytest.mark.slow
@pytest.mark.parametrize(
    "place",
    [
        "payload.data.tasks.chat_job.SampleFiles.packed",
        "payload.data.tasks.whole_folder_writer.fsync_folder",
        "payload.data.tasks.whole_folder_writer.write_meta",
        "payload.data.tasks.whole_folder_writer.remove_unfinished",
    ],
)
def test_a_run_killed_after_the_last_row_does_not_render_again(
    place: str, tokenizer: Path, tmp_path: Path
) -> None:
    source = write_mixed(tmp_path / "in", "groups")
    flags = (*FLAGS, *CASES["groups"])
    whole = prepare(tokenizer, source, tmp_path / "whole", *flags)
    words = prepare_words(tokenizer, source, tmp_path / "out", *flags)

    def killed(*_: object, **__: object) -> None:
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, killed)
        with pytest.raises(Killed):
            main(words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("payload.data.tasks.chat_reader.RowRendering", killed)
        assert main(words) == ExitCode.OK
    found = contents(tmp_path / "out")
    found.pop(JOURNAL_NAME, None)
    assert {name for name in found if not name.startswith("samples.")} == set(contents(whole))
    assert digests(tmp_path / "out") == digests(whole)


def test_a_damaged_file_of_samples_is_named(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_mixed(tmp_path / "in", "best-fit")
    words = prepare_words(tokenizer, source, tmp_path / "out", *FLAGS)

    kill_before_packing(words)
    samples = tmp_path / "out" / "samples.bin.partial"
    content = bytearray(samples.read_bytes())
    content[100] ^= 1
    samples.write_bytes(content)
    assert main(words) == ExitCode.CONFIG
    assert "samples.bin.partial: its SHA-256 differs" in capsys.readouterr().err
    assert main([*words, "--force"]) == ExitCode.OK


def starts_of(words: list[str]) -> int:
    """Run the command, and return how often its output starts from scratch."""
    started: list[ResumableTokenFiles] = []
    start = ResumableTokenFiles.start

    def noted(self: ResumableTokenFiles) -> None:
        started.append(self)
        start(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ResumableTokenFiles, "start", noted)
        assert main(words) == ExitCode.OK
    return len(started)


@pytest.mark.parametrize("package", ["gigatoken", "tokenizers", "jinja2", "rendering"])
def test_another_version_of_a_program_starts_from_scratch(
    package: str, tokenizer: Path, tmp_path: Path
) -> None:
    source = write_mixed(tmp_path / "in", "best-fit", count=200)
    whole = prepare(tokenizer, source, tmp_path / "whole", *FLAGS)
    out = tmp_path / "out"
    words = prepare_words(tokenizer, source, out, *FLAGS)

    kill_before_packing(words)
    journal = out / JOURNAL_NAME
    head, *shards = journal.read_text(encoding="utf-8").splitlines(keepends=True)
    found = json.loads(head)
    found["encoder"] = re.sub(rf"{package} [^,]+", f"{package} 0.0.1", found["encoder"])
    assert found != json.loads(head)
    journal.write_text("".join([json.dumps(found) + "\n", *shards]), encoding="utf-8")
    assert starts_of(words) == 1
    assert contents(out) == contents(whole)


def test_a_wrong_gigatoken_is_noticed_and_all_rows_are_tokenized_again(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_mixed(tmp_path / "in", "groups")
    flags = (*FLAGS, *CASES["groups"])
    whole = prepare(tokenizer, source, tmp_path / "whole", *flags)
    assert load_meta(whole).encoder.startswith("gigatoken ")
    words = prepare_words(tokenizer, source, tmp_path / "out", *flags)
    words.remove("--quiet")
    calls = itertools.count()
    check_sample = GigatokenEncoder.check_sample

    def wrong(self: GigatokenEncoder, texts: Sequence[bytes], encoded: Encoded) -> None:
        check_sample(self, texts, encoded)
        if next(calls) == 2:
            raise EncoderMismatchError("different tokens for b'word'")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GigatokenEncoder, "check_sample", wrong)
        kill_before_packing(words)
    assert "gigatoken differs from tokenizers (different tokens" in capsys.readouterr().err
    # A resumed run has the same encoder.
    assert starts_of(words) == 0
    assert load_meta(tmp_path / "out").encoder.startswith("tokenizers ")
    assert digests(tmp_path / "out") == digests(whole)


def test_the_estimate_of_the_disk_includes_the_samples(tokenizer: Path, tmp_path: Path) -> None:
    source = write_mixed(tmp_path / "in", "best-fit", count=200)
    out = prepare(tokenizer, source, tmp_path / "out", *FLAGS)
    args = parser().parse_args(prepare_words(tokenizer, source, tmp_path / "new", *FLAGS))
    _, found = estimate_whole(chat_job(args))
    kill_before_packing(prepare_words(tokenizer, source, tmp_path / "new", *FLAGS))
    samples = sum(each.stat().st_size for each in (tmp_path / "new").glob("samples.*"))
    assert samples > 0
    assert found.need_bytes == samples + sum(each.stat().st_size for each in out.glob("*.bin"))


def test_a_bad_row_is_named_in_order_and_leaves_nothing(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[dict[str, Any]] = [{"messages": each} for each in conversations(600)]
    rows[570]["messages"] = [{"role": "user", "content": "no answer"}]
    rows[571]["messages"] = "\ufdd0"
    rows[575]["messages"][0]["role"] = "nobody"
    source = write_rows(tmp_path / "in.jsonl", rows)
    with source.open("a", encoding="utf-8") as file:
        file.write("no JSON\n")
    assert main(prepare_words(tokenizer, source, tmp_path / "out")) == ExitCode.CONFIG
    message = capsys.readouterr().err
    assert f"{source} line 571: no message has role 'assistant'" in message
    assert not (tmp_path / "out").exists()
    # Also if a part of the run is already on disk.
    long = long_rows(tmp_path / "long.jsonl", count=400)
    words = [each for each in long_words(tokenizer, long, tmp_path / "out") if each != "--skip-bad"]
    lines = long.read_text(encoding="utf-8").replace('"nobody"', '"user"').splitlines()
    long.write_text("\n".join([*lines, "no JSON", *lines[:9]]), encoding="utf-8")
    assert main(words) == ExitCode.CONFIG
    assert f"{long} line 401: not JSON" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_keys_that_nothing_reads_are_counted_up_to_the_early_rows(
    tokenizer: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("payload.data.tasks.chat_reader.EARLY_ROWS", 400)
    rows = [{"messages": each, "mood": "good"} for each in conversations(600)]
    source = write_rows(tmp_path / "in.jsonl", rows)
    assert main(prepare_words(tokenizer, source, tmp_path / "out")) == ExitCode.CONFIG
    message = capsys.readouterr().err
    found = "in the first 400 rows, the task does not read these columns: 'mood' (399 rows)"
    assert found in message


# Not a constant, which Jinja would compute when it compiles the template.
SLOW = (
    "{% set n = messages | length + 7 %}"
    "{% if messages[0].content == 'slow' %}{{ n ** (n ** n) }}{% endif %}"
)


@pytest.mark.slow
def test_a_row_that_exceeds_the_limits_is_named_and_the_others_are_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(template_process, "CPU_SECONDS", 1)
    slow = make_tokenizer(tmp_path / "slow", template=SLOW + PLAIN_TEMPLATE)
    rows = [{"messages": turn(f"word {number}", "a")} for number in range(600)]
    for number in (300, 301, 590):
        rows[number]["messages"][0]["content"] = "slow"
    source = write_rows(tmp_path / "in.jsonl", rows)
    out = prepare(slow, source, tmp_path / "out", "--skip-bad")
    meta = load_meta(out)
    assert meta.train_documents + meta.val_documents == 597
    assert [each.partition(": ")[0] for each in meta.skipped_examples] == [
        f"{source} line {number}" for number in (301, 302, 591)
    ]
    assert all("over 1 s of processor time" in each for each in meta.skipped_examples)
    assert main(prepare_words(slow, source, tmp_path / "strict")) == ExitCode.CONFIG
    assert f"{source} line 301: " in capsys.readouterr().err


def peak_bytes(tokenizer: Path, source: Path, out: Path) -> int:
    """Return the highest memory of a process that prepares `source`."""
    done = subprocess.run(
        [sys.executable, "-c", _PEAK, *prepare_words(tokenizer, source, out)],
        cwd=REPOSITORY,
        env=environment({"RAYON_NUM_THREADS": "1"}),
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout.splitlines()[-1]) * 1024


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_memory_grows_by_a_small_index_of_the_rows(tokenizer: Path, tmp_path: Path) -> None:
    few, many = 6_000, 60_000
    rows = [{"messages": each} for each in conversations(few)]
    small = write_rows(tmp_path / "small.jsonl", rows)
    large = tmp_path / "large.jsonl"
    large.write_bytes(small.read_bytes() * (many // few))
    before = peak_bytes(tokenizer, small, tmp_path / "small")
    after = peak_bytes(tokenizer, large, tmp_path / "large")
    # In memory, the tokens and marks of a row took over 400 bytes, and its arrays as much again.
    assert (after - before) / (many - few) < 150


def test_other_special_tokens_start_from_scratch(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They decide the rendered text and the stop tokens, but not the tokenizer's file."""
    model = tmp_path / "model"
    shutil.copytree(tokenizer, model)
    words = prepare_words(model, write_mixed(tmp_path / "in", "best-fit"), tmp_path / "out", *FLAGS)

    kill_before_packing(words)
    (model / "generation_config.json").write_text('{"eos_token_id": 5}', encoding="utf-8")
    assert main(words) == ExitCode.CONFIG
    assert "have changed since the interrupted run" in capsys.readouterr().err
    assert main(words) == ExitCode.OK


def test_a_source_that_cannot_be_reached_for_a_moment_costs_no_tokens(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = long_rows(tmp_path / "in.jsonl")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert main(long_words(tokenizer, source, whole)) == ExitCode.OK
    stream = Rows.stream

    def cut(self: Rows) -> Iterator[Row]:
        yield from itertools.islice(stream(self), 700)
        raise UnreachableSourceError("the hub cannot be reached")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rows, "stream", cut)
        assert main(long_words(tokenizer, source, broken)) == ExitCode.CONFIG
    assert "the hub cannot be reached" in capsys.readouterr().err
    assert num_shards(broken) > 0
    words = [each for each in long_words(tokenizer, source, broken) if each != "--quiet"]
    assert main(words) == ExitCode.OK
    assert "resuming after" in capsys.readouterr().err
    assert contents(broken) == contents(whole)
