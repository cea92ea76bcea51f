"""`python -m payload.data prepare` as a process, on generated text and Python's library."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from payload.data.__main__ import main
from payload.data.sources.split import choose_split
from payload.data.writing.meta import verify_files
from payload.formats.data_folder import load_meta
from tests.data.running import (
    REPOSITORY,
    contents,
    data_command,
    environment,
    read_bin,
    reference_tokens,
    run_data,
    run_here,
    stdlib_texts,
    write_jsonl,
)

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """About 2 MB of source code, and some short texts."""
    return [*stdlib_texts(min_bytes=1)[::4], "", "caf\u00e9 \U0001f600 \u65e5\u672c", "x\r\ny"]


@pytest.fixture(scope="module")
def corpus(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", texts)


def test_files_hold_what_nanogpt_would_have_written(
    texts: list[str], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("payload.data.sources.documents.BATCH_BYTES", 500_000)
    out = tmp_path / "out"
    args = ["--source", "jsonl", "--input", corpus, "--out", out, "--val-fraction", "0.01"]
    result = run_here("prepare", *args, "--json")
    assert result.returncode == 0, result.stderr

    split = choose_split(documents=len(texts), val_fraction=0.01, seed=2357)
    is_val = split.val_mask(np.arange(len(texts)))
    train = [text for text, val in zip(texts, is_val, strict=True) if not val]
    val = [text for text, val in zip(texts, is_val, strict=True) if val]
    np.testing.assert_array_equal(read_bin(out / "train.bin"), reference_tokens(train))
    np.testing.assert_array_equal(read_bin(out / "val.bin"), reference_tokens(val))

    meta = load_meta(out)
    verify_files(out, meta)
    assert (meta.train_documents, meta.val_documents) == (len(train), len(val))
    assert meta.train_tokens + meta.val_tokens == len(reference_tokens(texts))
    assert meta.text_bytes == sum(len(text.encode()) for text in texts)
    assert meta.encoder.startswith("gigatoken ")
    assert json.loads(result.stdout)["train_tokens"] == meta.train_tokens
    assert sorted(contents(out)) == ["meta.json", "train.bin", "val.bin"]


def test_stdlib_gives_a_usable_validation_set_and_the_same_bytes_twice(tmp_path: Path) -> None:
    for name in ("a", "b"):
        result = run_here("prepare", "--source", "stdlib", "--out", tmp_path / name)
        assert result.returncode == 0, result.stderr
        assert "training tokens" in result.stdout
    meta = load_meta(tmp_path / "a")
    assert meta.val_documents >= 10
    assert meta.val_tokens >= 20_000
    assert meta.train_tokens > 20 * meta.val_tokens
    assert meta.skipped_documents == 0
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_text_jsonl_and_parquet_of_the_same_documents_give_the_same_tokens(
    texts: list[str], corpus: Path, tmp_path: Path
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    few = texts[-40:]
    (tmp_path / "text").mkdir()
    for number, text in enumerate(few):
        (tmp_path / "text" / f"{number:03}.txt").write_bytes(text.encode())
    write_jsonl(tmp_path / "few.jsonl", few, key="body")
    pq.write_table(pa.table({"body": few}), tmp_path / "few.parquet", row_group_size=7)
    made = []
    for kind, place in (("text", "text"), ("jsonl", "few.jsonl"), ("parquet", "few.parquet")):
        out = tmp_path / f"out_{kind}"
        column = [] if kind == "text" else ["--text-column", "body"]
        args = ["--source", kind, "--input", str(tmp_path / place), "--out", str(out), *column]
        assert main(["prepare", *args, "--quiet"]) == 0
        made.append((read_bin(out / "train.bin").tolist(), read_bin(out / "val.bin").tolist()))
    assert made[0] == made[1] == made[2]


def test_a_document_longer_than_a_piece_has_the_tokens_of_the_whole(tmp_path: Path) -> None:
    text = "\n".join(stdlib_texts(min_bytes=9_000_000))
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_bytes(text.encode())
    (tmp_path / "text" / "b.txt").write_bytes(b"short")
    args = ["--source", "text", "--input", str(tmp_path / "text"), "--quiet"]
    assert main(["prepare", *args, "--out", str(tmp_path / "out"), "--seed", "1"]) == 0
    found = [read_bin(tmp_path / "out" / name) for name in ("train.bin", "val.bin")]
    whole = max(found, key=len)
    np.testing.assert_array_equal(whole, reference_tokens([text]))


def test_max_documents_takes_the_first_ones(texts: list[str], corpus: Path, tmp_path: Path) -> None:
    args = ["--source", "jsonl", f"--input={corpus}", f"--out={tmp_path / 'out'}", "--quiet"]
    assert main(["prepare", *args, "--max-documents", "30"]) == 0
    tokens = [read_bin(tmp_path / "out" / name) for name in ("train.bin", "val.bin")]
    assert sum(map(len, tokens)) == len(reference_tokens(texts[:30]))


def test_source_of_unknown_length_is_split_by_hash_and_meta_says_so(
    texts: list[str], tmp_path: Path
) -> None:
    import gzip

    lines = "".join(json.dumps({"text": text}) + "\n" for text in (texts * 5)[:200])
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    args = ["--source", "jsonl", f"--input={tmp_path / 'a.jsonl.gz'}", "--quiet"]
    assert main(["prepare", *args, f"--out={tmp_path / 'out'}", "--val-fraction", "0.05"]) == 0
    meta = load_meta(tmp_path / "out")
    assert meta.split.method == "hash"
    assert meta.train_documents + meta.val_documents == 200


@pytest.mark.slow
def test_memory_stays_bounded_on_words_that_never_repeat(tmp_path: Path) -> None:
    # 120 MB of distinct words would take 1.45 GB in one gigatoken tokenizer.
    generator = np.random.default_rng(0)
    source = tmp_path / "words.jsonl"
    with source.open("wb") as file:
        for _ in range(15):
            letters = generator.integers(97, 123, size=(1_000_000, 8), dtype=np.uint8)
            letters[:, 0] = ord(" ")
            for text in letters.reshape(-1, 8_000):
                file.write(b'{"text":"' + text.tobytes() + b'"}\n')
    # A child's ru_maxrss includes its parent's memory; VmHWM is only the program's.
    program = (
        "import sys; from payload.data.__main__ import main; status = main(sys.argv[1:]); "
        "print(open('/proc/self/status').read()); sys.exit(status)"
    )
    words = ["prepare", "--source", "jsonl", "--input", source, "--out", tmp_path / "out"]
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, words)],
        cwd=REPOSITORY,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    (peak_kib,) = re.findall(r"VmHWM:\s+(\d+) kB", done.stdout)
    assert int(peak_kib) * 1024 < 1_200_000_000


def test_tiktoken_is_used_and_announced_where_gigatoken_cannot_be(
    texts: list[str], tmp_path: Path
) -> None:
    stub = tmp_path / "stub" / "gigatoken"
    stub.mkdir(parents=True)
    (stub / "__init__.py").write_text("raise ImportError('no wheel for this machine')\n")
    source = write_jsonl(tmp_path / "few.jsonl", texts[-30:])
    args = ["--source", "jsonl", "--input", source]
    slow = run_data(
        "prepare", *args, "--out", tmp_path / "a", extra={"PYTHONPATH": str(stub.parent)}
    )
    assert slow.returncode == 0, slow.stderr
    assert "tiktoken; the faster gigatoken cannot be used: no wheel for this machine" in slow.stderr
    assert load_meta(tmp_path / "a").encoder.startswith("tiktoken ")
    assert run_here("prepare", *args, "--out", tmp_path / "b").returncode == 0
    for name in ("train.bin", "val.bin"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_wrong_gigatoken_is_noticed_and_everything_is_done_again_by_tiktoken(
    texts: list[str], tmp_path: Path
) -> None:
    stub = tmp_path / "stub" / "gigatoken"
    stub.mkdir(parents=True)
    (stub / "__init__.py").write_text(WRONG_ON_ZEBRA)
    zebras = [f"a zebra and {text}" for text in texts[-30:]]
    source = write_jsonl(tmp_path / "few.jsonl", zebras)
    result = run_data(
        *("prepare", "--source", "jsonl", "--input", source, "--out", tmp_path / "out"),
        extra={"PYTHONPATH": str(stub.parent)},
    )
    assert result.returncode == 0, result.stderr
    assert "gigatoken differs from tiktoken" in result.stderr
    assert load_meta(tmp_path / "out").encoder.startswith("tiktoken ")
    found = np.concatenate([read_bin(tmp_path / "out" / name) for name in ("train.bin", "val.bin")])
    assert sorted(found) == sorted(reference_tokens(zebras))


WRONG_ON_ZEBRA = """
from types import SimpleNamespace
import numpy as np
from payload.data.writing.encoder_choice import ReferenceEncoder
from payload.data.tokenizers.gpt2 import gpt2_tokenizer

class Tokenizer:
    @classmethod
    def from_tiktoken(cls, *_, **__):
        return cls()

    def encode_batch(self, texts, **_):
        encoded = ReferenceEncoder(gpt2_tokenizer()).encode(texts)
        tokens = encoded.tokens.copy()
        for index, text in enumerate(texts):
            if b"zebra" in text:
                tokens[encoded.offsets[index]] = 0
        parts = SimpleNamespace(
            offsets=SimpleNamespace(data=encoded.offsets), content=SimpleNamespace(data=tokens)
        )
        return SimpleNamespace(layout=parts)
"""


def test_a_folder_made_by_default_is_ready_however_its_share_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    source = write_jsonl(tmp_path / "few.jsonl", [f"document {i}" for i in range(100)])
    args = ["prepare", "--source", "jsonl", f"--input={source}", f"--out={out}"]
    for first, then, used, few in (
        ([], ["--val-fraction", "0.1"], 0.1, True),
        # The former default for every source.
        (["--val-fraction", "0.0005"], [], 0.0005, True),
        (["--val-fraction", "0.2"], ["--val-fraction", "0.2"], 0.2, False),
    ):
        assert main([*args, *first, "--force"]) == 0
        assert load_meta(out).split.val_fraction == used
        said = capsys.readouterr().err
        assert ("for validation, too few for a reliable loss" in said) is few
        assert ("Use --val-fraction 0.2 with --force." in said) is few
        assert main([*args, *then]) == 0
        said = capsys.readouterr().err
        assert "nothing to do" in said
        assert ("for validation, too few for a reliable loss" in said) is few
    assert main(args) == 10
    assert "--val-fraction 0.2, --seed 2357." in capsys.readouterr().err


def test_dry_run_shows_the_plan_and_writes_nothing(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    args = ["--source", "jsonl", "--input", corpus, "--out", out, "--dry-run"]
    result = run_here("prepare", *args)
    assert result.returncode == 0, result.stderr
    assert "documents   " in result.stdout
    assert not out.exists()
    told = json.loads(run_here("prepare", *args, "--json").stdout)
    assert told["need_bytes"] == 2 * told["tokens"]


def test_results_go_to_stdout_and_messages_to_stderr(corpus: Path, tmp_path: Path) -> None:
    args = ["--source", "jsonl", "--input", corpus, "--out", tmp_path / "out"]
    result = run_data("prepare", *args)
    assert result.stdout.count("\n") == 1
    for word in ("tokenizer: ", "source: ", "documents: ", "disk: about "):
        assert word in result.stderr
    assert "\x1b" not in result.stderr


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_file_at_the_output_path_is_named(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["prepare", "--source", "stdlib", "--out", str(tmp_path / place)]) == 10
    assert "the path or a parent folder is a file" in capsys.readouterr().err


def test_the_standard_library_is_a_source(tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = json.loads(run_data("prepare", "--source", "stdlib", "--out", out, "--json").stdout)
    assert not report["was_ready"]
    assert report["wall_s"] > report["worked_s"] > 0
    assert load_meta(out).train_tokens == report["train_tokens"] > 10_000_000


def test_help_is_fast_because_it_loads_no_library() -> None:
    probe = (
        "import sys; from payload.data.__main__ import main\n"
        "try: main(['prepare', '--help-all'])\n"
        "except SystemExit: pass\n"
        "print({'numpy', 'datasets', 'pyarrow', 'gigatoken', 'tiktoken'} & set(sys.modules))"
    )
    result = subprocess.run(
        [data_command()[0], "-c", probe], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert result.stdout.endswith("set()\n")
    assert "--val-fraction SHARE" in result.stdout
    assert "data/stdlib" in result.stdout
