"""A model that learns Debian's sections from package descriptions, against TF-IDF features.

    python -m benchmarks.classify --model FOLDER [--steps 125] [--config TOML] [--set KEY=VALUE]
    python -m benchmarks.classify --model FOLDER --few 2500

The texts are the one-line descriptions in apt's lists, the labels the sections with the most
packages. `--sections topics` leaves out the sections that say how a package is built or in which
language (libdevel, python, doc, ...): single words give these away ("development files"), while a
topic takes some knowledge of the world. The peer is scikit-learn's logistic regression. Both read
the same training texts and are measured on the same held-out ones. The peer has its best
regularisation on these, which favours it. The standard error of the margin and McNemar's test come
from the texts that one of the two has right and the other wrong.

`--few COUNT` learns from so many other texts, a fifth of which only validate the run, and measures
on all of the benchmark's own.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import describe_machine
from benchmarks.tables import Table
from payload.data.labelled import open_labelled
from payload.data_folder import load_meta
from payload.train.models.classifier import Classifier
from payload.train.models.registry import load

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
_ROWS = 64
SPLITS = ("train", "val")
_OURS = "tileforge"
_STRENGTHS = (3.0, 10.0, 30.0, 100.0)
"""Inverse regularisation of the logistic regression."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Margin:
    """Difference of two classifiers' accuracies on the same texts."""

    points: float
    standard_error: float
    """In points, of the difference on paired texts."""
    p: float
    """Two-sided exact McNemar test."""

    @classmethod
    def of(cls, ours: Sequence[bool], theirs: Sequence[bool]) -> Margin:
        """Compare which texts each has right."""
        from scipy.stats import binomtest

        pairs = list(zip(ours, theirs, strict=True))
        gained = sum(a and not b for a, b in pairs)
        lost = sum(b and not a for a, b in pairs)
        mean, count = (gained - lost) / len(pairs), len(pairs)
        spread = math.sqrt(max(0.0, (gained + lost) / count - mean**2) / count)
        apart = gained + lost
        p = float(binomtest(gained, apart).pvalue) if apart else 1.0
        return cls(points=100 * mean, standard_error=100 * spread, p=p)


def main(argv: Sequence[str]) -> int:
    """Prepare the texts, train both, print the margins."""
    arguments = _parser().parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        found = list(packages())
        if arguments.sections == "topics":
            found = [row for row in found if row[1] not in FORMS]
        own, others = (
            [(text + arguments.ending, label) for text, label in rows]
            for rows in choose(
                found, labels=arguments.labels, texts=arguments.texts, others=arguments.few
            )
        )
        write(work / "texts.csv", others or own)
        _prepare(work, model=arguments.model)
        train, held_out = (_split(work / "data", each, arguments.model) for each in SPLITS)
        if others:
            held_out = _Texts.of(own)
        held_out = held_out.first(arguments.measure)
        sets = [f"model.init={arguments.model}", f"train.steps={arguments.steps}"]
        evaluation, took_s = _train(work, config=arguments.config, sets=[*sets, *arguments.sets])
        result: dict[str, Any] = {
            "benchmark": "classify",
            "machine": describe_machine(),
            "texts": len(train.texts),
            "held_out": len(held_out.texts),
            "labels": arguments.labels,
            "sections": arguments.sections,
            "train_s": round(took_s, 1),
            "val_accuracy": evaluation["val_accuracy"],
        }
        ours = _labels(work, held_out, model=arguments.model)
        peers = dict(_peers(train, held_out))
    return _report(result, held_out.labels, ours, peers)


def _report(
    result: dict[str, Any], own: list[str], ours: list[str], peers: dict[str, list[str]]
) -> int:
    """Print the accuracies and margins; return 0 when the model beats the stronger peer."""
    from sklearn.metrics import f1_score

    right = {
        name: [label == each for label, each in zip(given, own, strict=True)]
        for name, given in {_OURS: ours, **peers}.items()
    }
    accuracy = {name: sum(each) / len(each) for name, each in right.items()}
    margins = {name: Margin.of(right[_OURS], right[name]) for name in peers}
    f1 = float(f1_score(own, ours, average="macro"))
    columns = ("accuracy", "macro F1", "margin, points", "standard error", "McNemar p")
    table = Table(*columns, labels=right)
    table.row(_OURS, f"{accuracy[_OURS]:.2%}", f"{f1:.4f}")
    for name, margin in margins.items():
        numbers = (f"{margin.points:+.2f}", f"{margin.standard_error:.2f}", f"{margin.p:.2g}")
        table.row(name, f"{accuracy[name]:.2%}", "", *numbers)
    found = {
        "accuracy": accuracy.pop(_OURS),
        "f1": f1,
        "peer_accuracy": accuracy,
        "margins": {name: asdict(margin) for name, margin in margins.items()},
    }
    print(json.dumps(result | found))
    return 0 if min(each.points for each in margins.values()) > 0 else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.classify",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", required=True, metavar="DIR", help="language model to begin with"
    )
    parser.add_argument("--labels", type=int, default=LABELS, metavar="COUNT")
    parser.add_argument("--sections", choices=("all", "topics"), default="all")
    parser.add_argument("--texts", type=int, default=TEXTS, metavar="COUNT")
    parser.add_argument(
        "--few", type=int, default=0, metavar="COUNT", help="learn from so many other texts"
    )
    parser.add_argument(
        "--measure", type=int, metavar="COUNT", help="keep to the first of the held-out texts"
    )
    parser.add_argument("--steps", type=int, default=125, metavar="COUNT")
    parser.add_argument("--config", type=Path, default=CONFIG, metavar="TOML", help="the recipe")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="sets")
    parser.add_argument(
        "--ending", default=ENDING, metavar="TEXT", help="put after each description"
    )
    parser.add_argument("--work", type=Path, metavar="DIR", help="folder to keep data and run in")
    return parser


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


def choose(
    found: Sequence[tuple[str, str]], *, labels: int, texts: int, others: int = 0
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return `texts` of the `labels` most frequent sections, and `others` besides.

    They are the same for the same lists.
    """
    counts = Counter(label for _, label in found)
    by_count = sorted(counts.items(), key=lambda each: (-each[1], each[0]))
    kept = {label for label, _ in by_count[:labels]}
    rows = sorted(row for row in found if row[1] in kept)
    order = np.random.default_rng(_SEED).permutation(len(rows))[: texts + others]
    return [rows[place] for place in order[:texts]], [rows[place] for place in order[texts:]]


def write(path: Path, rows: Sequence[tuple[str, str]]) -> None:
    """Write a csv with the columns `text` and `label`."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("text", "label"))
        writer.writerows(rows)


def _prepare(work: Path, *, model: str) -> None:
    words = ["--task", "classify", "--source", "csv", "--input", str(work / "texts.csv")]
    words += ["--tokenizer", model, "--val-fraction", "0.2", "--out", str(work / "data")]
    _run_quietly("payload.data", "prepare", *words, "--quiet")


def _run_quietly(*words: str) -> None:
    """Run a module whose results are not this program's."""
    subprocess.run([sys.executable, "-m", *words], check=True, stdout=sys.stderr)


def _train(work: Path, *, config: Path, sets: Sequence[str]) -> tuple[dict[str, Any], float]:
    """Return the last evaluation, and the seconds that the run took."""
    run = work / "run"
    words = [word for each in (f"data.dir={work / 'data'}", *sets) for word in ("--set", each)]
    began = time.perf_counter()
    _run_quietly("payload.train", "--config", str(config), "--run-dir", str(run), *words)
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if "val_loss" in row][-1], time.perf_counter() - began


def _labels(work: Path, held_out: _Texts, *, model: str) -> list[str]:
    """Return the label that the run's last checkpoint gives each text, computed in bf16."""
    import torch
    from tokenizers import Tokenizer

    (checkpoint,) = (work / "run" / "checkpoints").glob("step_*")
    classifier = load(checkpoint).eval()
    assert isinstance(classifier, Classifier)
    tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    encoded = [tokenizer.encode(text).ids for text in held_out.texts]
    order = sorted(range(len(encoded)), key=lambda place: len(encoded[place]))
    given = [""] * len(order)
    for start in range(0, len(order), _ROWS):
        places = order[start : start + _ROWS]
        tokens = torch.full((len(places), len(encoded[places[-1]])), classifier.pad_token)
        for row, place in enumerate(places):
            tokens[row, : len(encoded[place])] = torch.tensor(encoded[place])
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            chosen = classifier.class_logits(tokens).argmax(-1).tolist()
        for place, number in zip(places, chosen, strict=True):
            given[place] = classifier.labels[number]
    return given


def _peers(train: _Texts, held_out: _Texts) -> Iterator[tuple[str, list[str]]]:
    """Yield the labels by logistic regression on TF-IDF features, each at its best."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_union

    words = {"ngram_range": (1, 2), "sublinear_tf": True}
    letters = {"analyzer": "char_wb", "ngram_range": (2, 5), "sublinear_tf": True}
    wanted = np.array(held_out.labels)
    for name, features in (
        ("TF-IDF of words", TfidfVectorizer(**words)),
        ("and of letters", make_union(TfidfVectorizer(**words), TfidfVectorizer(**letters))),
    ):
        known, unknown = features.fit_transform(train.texts), features.transform(held_out.texts)
        tried = (
            LogisticRegression(C=strength, max_iter=2000).fit(known, train.labels)
            for strength in _STRENGTHS
        )
        given = (one.predict(unknown) for one in tried)
        yield name, max(given, key=lambda each: (each == wanted).sum()).tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Texts:
    """The texts of one split, and the label of each."""

    texts: list[str]
    labels: list[str]

    def first(self, count: int | None) -> _Texts:
        """Return the first `count` texts; None = all."""
        return _Texts(texts=self.texts[:count], labels=self.labels[:count])

    @classmethod
    def of(cls, rows: Sequence[tuple[str, str]]) -> _Texts:
        """Take rows of a text and its label."""
        return cls(texts=[text for text, _ in rows], labels=[label for _, label in rows])


def _split(folder: Path, name: str, model: str) -> _Texts:
    """Return the texts and labels of one split, as the run reads them."""
    from tokenizers import Tokenizer

    meta = load_meta(folder)
    assert meta.classify is not None
    found = open_labelled(folder / f"{name}.bin", meta=meta, sequence_length=2**20)
    tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    spans = zip(found.starts.tolist(), found.lengths.tolist(), strict=True)
    return _Texts(
        texts=[
            tokenizer.decode(found.tokens[start : start + size].tolist()) for start, size in spans
        ],
        labels=[meta.classify.labels[number] for number in found.labels.tolist()],
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
