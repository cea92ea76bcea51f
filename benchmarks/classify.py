"""A model that learns Debian's sections from package descriptions, against TF-IDF features.

    python -m benchmarks.classify --model FOLDER [--steps 125] [--config TOML] [--set KEY=VALUE]

The texts are the one-line descriptions in apt's lists, the labels the sections with the most
packages. `--sections topics` leaves out the sections that say how a package is built or in which
language (libdevel, python, doc, ...): single words give these away ("development files"), while a
topic takes some knowledge of the world. The peer is scikit-learn's logistic regression. Both read
the same training texts and are measured on the same held-out ones. The peer has its best
regularisation on these, which favours it.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import describe_machine
from benchmarks.tables import Table
from payload.data.labelled import open_labelled
from payload.data_folder import load_meta

LABELS = 12
TEXTS = 10_000
ENDING = " Debian section:"
"""Each text's last words: the label is read off the last token, and this one asks for it. What it
gains was not measured by itself."""
CONFIG = Path("payload/configs/classify.toml")
FORMS = frozenset(
    {
        "cli-mono",
        "debug",
        "devel",
        "doc",
        "fonts",
        "gnu-r",
        "golang",
        "haskell",
        "interpreters",
        "introspection",
        "java",
        "javascript",
        "kernel",
        "libdevel",
        "libs",
        "lisp",
        "localization",
        "metapackages",
        "misc",
        "ocaml",
        "oldlibs",
        "perl",
        "php",
        "python",
        "ruby",
        "rust",
        "translations",
        "zope",
    }
)
"""Sections that say what a package is made of, or its language; the others name a topic."""
_SEED = 20261123
_STRENGTHS = (1.0, 3.0, 10.0, 30.0)
"""Inverse regularisation of the logistic regression."""


def main(argv: Sequence[str]) -> int:
    """Prepare the texts, train both, print the margin."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.classify", description=__doc__)
    parser.add_argument(
        "--model", required=True, metavar="DIR", help="language model to begin with"
    )
    parser.add_argument("--labels", type=int, default=LABELS, metavar="COUNT")
    parser.add_argument("--sections", choices=("all", "topics"), default="all")
    parser.add_argument("--texts", type=int, default=TEXTS, metavar="COUNT")
    parser.add_argument("--steps", type=int, default=125, metavar="COUNT")
    parser.add_argument("--config", type=Path, default=CONFIG, metavar="TOML", help="the recipe")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="sets")
    parser.add_argument(
        "--ending", default=ENDING, metavar="TEXT", help="put after each description"
    )
    parser.add_argument("--work", type=Path, metavar="DIR", help="folder to keep data and run in")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        found = list(packages())
        if arguments.sections == "topics":
            found = [row for row in found if row[1] not in FORMS]
        rows = choose(found, labels=arguments.labels, texts=arguments.texts)
        write(work / "texts.csv", [(text + arguments.ending, label) for text, label in rows])
        _prepare(work, model=arguments.model)
        peer = _peer(work, model=arguments.model)
        ours, took_s = _train(
            work,
            config=arguments.config,
            sets=[
                f"model.init={arguments.model}",
                f"train.steps={arguments.steps}",
                *arguments.sets,
            ],
        )
    result = {
        "benchmark": "classify",
        "machine": describe_machine(),
        "texts": len(rows),
        "labels": arguments.labels,
        "sections": arguments.sections,
        "accuracy": ours["val_accuracy"],
        "f1": ours["val_f1"],
        "train_s": round(took_s, 1),
        "peer_accuracy": peer,
        "margin": ours["val_accuracy"] - max(peer.values()),
    }
    table = Table("accuracy", "macro F1", labels=["margin, points", *peer])
    table.row("tileforge", f"{result['accuracy']:.2%}", f"{result['f1']:.4f}")
    for name, accuracy in peer.items():
        table.row(name, f"{accuracy:.2%}")
    table.row("margin, points", f"{100 * float(result['margin']):+.2f}")
    print(json.dumps(result))
    return 0 if float(result["margin"]) > 0 else 1


def packages() -> Iterator[tuple[str, str]]:
    """Yield description and section of the packages in apt's lists; a description once."""
    done = subprocess.run(["apt-cache", "dumpavail"], capture_output=True, check=True)
    seen = set()
    for paragraph in done.stdout.decode("utf-8", "replace").split("\n\n"):
        lines = (line for line in paragraph.split("\n") if not line.startswith(" "))
        fields = dict(line.split(": ", 1) for line in lines if ": " in line)
        text = (fields.get("Description") or fields.get("Description-en") or "").strip()
        section = fields.get("Section", "").rpartition("/")[2]
        if text and section and text not in seen:
            seen.add(text)
            yield text, section


def choose(found: Sequence[tuple[str, str]], *, labels: int, texts: int) -> list[tuple[str, str]]:
    """Return `texts` of the `labels` most frequent sections, the same for the same lists."""
    counts = Counter(label for _, label in found)
    by_count = sorted(counts.items(), key=lambda each: (-each[1], each[0]))
    kept = {label for label, _ in by_count[:labels]}
    rows = sorted(row for row in found if row[1] in kept)
    order = np.random.default_rng(_SEED).permutation(len(rows))[:texts]
    return [rows[place] for place in order]


def write(path: Path, rows: Sequence[tuple[str, str]]) -> None:
    """Write a csv with the columns `text` and `label`."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("text", "label"))
        writer.writerows(rows)


def _prepare(work: Path, *, model: str) -> None:
    words = ["--task", "classify", "--source", "csv", "--input", str(work / "texts.csv")]
    words += ["--tokenizer", model, "--val-fraction", "0.2", "--out", str(work / "data"), "--quiet"]
    subprocess.run(
        [sys.executable, "-m", "payload.data", "prepare", *words], check=True, stdout=sys.stderr
    )


def _train(work: Path, *, config: Path, sets: Sequence[str]) -> tuple[dict[str, Any], float]:
    """Return the last evaluation, and the seconds that the run took."""
    run = work / "run"
    words = [word for each in (f"data.dir={work / 'data'}", *sets) for word in ("--set", each)]
    began = time.perf_counter()
    command = [
        sys.executable,
        "-m",
        "payload.train",
        "--config",
        str(config),
        "--run-dir",
        str(run),
    ]
    subprocess.run([*command, *words], check=True, stdout=sys.stderr)
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if "val_loss" in row][-1], time.perf_counter() - began


def _peer(work: Path, *, model: str) -> dict[str, float]:
    """Return the accuracy of logistic regression on TF-IDF features, each at its best."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_union

    (texts, labels), (held_out, wanted) = (
        _split(work / "data", name, model) for name in ("train", "val")
    )
    words = {"ngram_range": (1, 2), "sublinear_tf": True}
    letters = {"analyzer": "char_wb", "ngram_range": (2, 5), "sublinear_tf": True}
    found = {}
    for name, features in (
        ("TF-IDF of words", TfidfVectorizer(**words)),
        ("and of letters", make_union(TfidfVectorizer(**words), TfidfVectorizer(**letters))),
    ):
        train, val = features.fit_transform(texts), features.transform(held_out)
        found[name] = max(
            float(
                np.mean(
                    LogisticRegression(C=c, max_iter=2000).fit(train, labels).predict(val) == wanted
                )
            )
            for c in _STRENGTHS
        )
    return found


def _split(folder: Path, name: str, model: str) -> tuple[list[str], list[int]]:
    """Return the texts and labels of one split, as the run reads them."""
    from tokenizers import Tokenizer

    meta = load_meta(folder)
    texts = open_labelled(folder / f"{name}.bin", meta=meta, sequence_length=2**20)
    tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    spans = zip(texts.starts.tolist(), texts.lengths.tolist(), strict=True)
    decoded = [
        tokenizer.decode(texts.tokens[start : start + size].tolist()) for start, size in spans
    ]
    return decoded, texts.labels.tolist()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
