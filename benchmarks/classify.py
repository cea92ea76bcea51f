"""A fine-tuned model's accuracy on Debian's package descriptions, compared with TF-IDF features.

    python -m benchmarks.classify --model FOLDER [--config TOML] [--set KEY=VALUE]
    python -m benchmarks.classify --model FOLDER --on validation --texts 2000
    python -m benchmarks.classify --peers --split texts --held-out 3000

The labels are the sections with the most packages. `--sections topics` leaves out the sections for
the form or the language of a package (libdevel, python, doc, ...): single words identify these
("development files"), while a topic takes some knowledge of the world.

Training texts, validation texts (`--on validation`, to choose a recipe) and held-out texts come
from different source packages. With `--split texts` a third of the held-out texts share a source
with a training text, from which they often differ by a single word. `--peers` trains only the peers
and reports the accuracy on both kinds of texts.

The peer is scikit-learn's logistic regression on the same texts. Its regularisation is the best for
the measured texts, which favours the peer. The standard error of the margin is for paired texts
clustered by source package, and its p-value is from a normal distribution.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Benchmark
from benchmarks.package_texts import FORMS, PackageText, Parts, divide, packages, write_csv
from payload.train.checkpoints.checkpoint import load_trainer_state
from payload.train.models.classifier import Classifier
from payload.train.models.loading import load

LABELS = 12
TEXTS = 8_000
VALIDATION, HELD_OUT = 2_000, 10_000
ENDING = " Debian section:"
"""Ending of each text; its last token predicts the label. The gain from this ending was not
measured."""
CONFIG = Path("payload/configs/classify.toml")
_ROWS = 64
_OWN_VALIDATION = 0.01
"""Share of the training texts that `prepare` reserves for the run's evaluations."""
_OURS = "tileforge"
_STRENGTHS = (3.0, 10.0, 30.0, 100.0)
"""Tried values of C, the inverse regularisation strength of the logistic regression."""
_FEWEST_SOURCES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Margin:
    """Difference between two classifiers' accuracies on the same texts."""

    points: float
    standard_error: float
    """Standard error of the difference in percentage points, from paired texts that are clustered
    by source."""
    p: float
    """Two-sided p-value of a normal distribution."""

    @classmethod
    def of(cls, ours: Sequence[bool], theirs: Sequence[bool], sources: Sequence[str]) -> Margin:
        """Return the margin, from whether each classifier is right about each text.

        Texts of one source are right or wrong together ("NAME documentation"), so only sources are
        independent of each other.
        """
        gains = np.array(ours, dtype=float) - np.array(theirs, dtype=float)
        mean, count = float(gains.mean()), len(gains)
        names, cluster = np.unique(np.array(sources), return_inverse=True)
        if len(names) < _FEWEST_SOURCES:
            raise ValueError(f"{len(names)} source(s): too few for a standard error")
        sums = np.bincount(cluster, weights=gains - mean)
        spread = float((sums**2).sum()) * len(names) / (len(names) - 1)
        error = math.sqrt(spread) / count
        p = math.erfc(abs(mean) / error / math.sqrt(2)) if mean else 1.0
        return cls(points=100 * mean, standard_error=100 * error, p=p)


def main(argv: Sequence[str]) -> int:
    """Prepare the texts, train both, and compare; return 0 if the model beats both peers."""
    benchmark = _benchmark()
    arguments = benchmark.parse(argv)
    parts = _parts(arguments)
    measured = parts.validation if arguments.on == "validation" else parts.held_out
    if arguments.peers:
        return _report_peers(benchmark, parts.train, measured)
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        write_csv(work / "texts.csv", parts.train, ending=arguments.ending)
        _prepare(work, model=arguments.model)
        sets = [f"model.init={arguments.model}", *arguments.sets]
        took_s = _train(work, config=arguments.config, sets=sets, keeps=arguments.work is not None)
        texts = [row.text + arguments.ending for row in measured]
        ours = _labels(work, texts, model=arguments.model)
        (work / f"labels_{arguments.on}.json").write_text(json.dumps(ours))
    result: dict[str, Any] = {"texts": len(parts.train), "measured": len(measured)}
    result |= {"train_s": None if took_s is None else round(took_s, 1)}
    return _report(benchmark, result, measured, ours, dict(_peers(parts.train, measured)))


def _parts(arguments: argparse.Namespace) -> Parts:
    """Return the texts that the options choose."""
    found: Iterator[PackageText] = iter(packages())
    if arguments.sections == "topics":
        found = (row for row in found if row.label not in FORMS)
    return divide(
        found,
        labels=arguments.labels,
        train=arguments.texts,
        validation=arguments.validation,
        held_out=arguments.held_out,
        by_source=arguments.split == "sources",
    )


def _report(
    benchmark: Benchmark,
    result: dict[str, Any],
    measured: Sequence[PackageText],
    ours: list[str],
    peers: dict[str, list[str]],
) -> int:
    """Print accuracies and margins; return 0 if the model beats the stronger peer."""
    from sklearn.metrics import f1_score

    own = [row.label for row in measured]
    right = {
        name: [label == each for label, each in zip(given, own, strict=True)]
        for name, given in {_OURS: ours, **peers}.items()
    }
    accuracy = {name: sum(each) / len(each) for name, each in right.items()}
    sources = [row.source for row in measured]
    margins = {name: Margin.of(right[_OURS], right[name], sources) for name in peers}
    f1 = float(f1_score(own, ours, average="macro"))
    columns = ("accuracy", "macro F1", "margin, points", "standard error", "p")
    table = benchmark.table(*columns, labels=right)
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
    benchmark.finish(result | found, packages=("torch", "scikit-learn"))
    return 0 if min(each.points for each in margins.values()) > 0 else 1


def _report_peers(
    benchmark: Benchmark, train: Sequence[PackageText], measured: Sequence[PackageText]
) -> int:
    """Print the peers' accuracies, by whether a text's source also has training texts."""
    trained = {row.source for row in train}
    shared = np.array([row.source in trained for row in measured])
    expected = np.array([row.label for row in measured])
    columns = ("accuracy", "shared source", "other sources")
    table = benchmark.table(*columns, labels=("TF-IDF of words",))
    found: dict[str, dict[str, float | None]] = {}
    for name, given in _peers(train, measured):
        right = np.array(given) == expected
        chosen = (right, right[shared], right[~shared])
        shares = [float(each.mean()) if len(each) else None for each in chosen]
        table.row(name, *("" if each is None else f"{each:.2%}" for each in shares))
        found[name] = dict(zip(columns, shares, strict=True))
    numbers = {"texts": len(train), "measured": len(measured), "shared": float(shared.mean())}
    benchmark.finish({**numbers, "peers": found}, packages=("scikit-learn",))
    return 0


def _benchmark() -> Benchmark:
    benchmark = Benchmark("classify", __doc__)
    parser = benchmark.parser
    add = parser.add_argument
    measures = parser.add_mutually_exclusive_group(required=True)
    measures.add_argument("--model", metavar="DIR", help="language model to fine-tune")
    measures.add_argument("--peers", action="store_true", help="train only the peers")
    _add_texts(parser.add_argument)
    add("--config", type=Path, default=CONFIG, metavar="TOML", help="recipe (default: %(default)s)")
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="sets",
        help="override a setting of the recipe; repeatable (default: none)",
    )
    add(
        "--work",
        type=Path,
        metavar="DIR",
        help="folder that keeps data and run, so that the same command resumes a stopped run "
        "(default: a temporary folder)",
    )
    return benchmark


def _add_texts(add: Callable[..., Any]) -> None:
    """Add the options that choose training and measured texts."""

    def count(flag: str, default: int, meaning: str) -> None:
        add(
            flag,
            type=int,
            default=default,
            metavar="COUNT",
            help=f"{meaning} (default: {default:,})",
        )

    count("--labels", LABELS, "number of labels, the sections with the most packages")
    add(
        "--sections",
        choices=("all", "topics"),
        default="all",
        help="all sections, or only those that name a topic (default: %(default)s)",
    )
    count("--texts", TEXTS, "training texts")
    count("--validation", VALIDATION, "validation texts, to choose a recipe")
    count("--held-out", HELD_OUT, "held-out texts, to measure the chosen recipe")
    add(
        "--on",
        choices=("validation", "held-out"),
        default="held-out",
        help="texts to measure on (default: %(default)s)",
    )
    add(
        "--split",
        choices=("sources", "texts"),
        default="sources",
        help="keep the texts of a source package together, or divide text by text (default: "
        "%(default)s)",
    )
    add(
        "--ending",
        default=ENDING,
        metavar="TEXT",
        help="text after each description (default: '%(default)s')",
    )


def _prepare(work: Path, *, model: str) -> None:
    options = ["--task", "classify", "--source", "csv", "--input", str(work / "texts.csv")]
    options += ["--tokenizer", model, "--val-fraction", str(_OWN_VALIDATION)]
    _run_quietly("payload.data", "prepare", *options, "--out", str(work / "data"), "--quiet")


def _run_quietly(module: str, *options: str) -> None:
    """Run a module with its stdout sent to stderr."""
    subprocess.run([sys.executable, "-m", module, *options], check=True, stdout=sys.stderr)


def _train(work: Path, *, config: Path, sets: Sequence[str], keeps: bool) -> float | None:
    """Return the seconds that the run took; None if it resumed an earlier run.

    `keeps` is true if `work` outlives this program. Exits with an error if the run was stopped.
    """
    resumes = any((work / "run" / "checkpoints").glob("step_*"))
    overrides = [f"data.dir={work / 'data'}", *sets]
    options = [each for override in overrides for each in ("--set", override)]
    began = time.perf_counter()
    where = ("--config", str(config), "--run-dir", str(work / "run"))
    _run_quietly("payload.train", *where, *options)
    status = json.loads((work / "run" / "summary.json").read_text())["status"]
    if status != "finished":
        again = "Run the same command again: it resumes from the last checkpoint."
        if not keeps:
            again = "Run it with --work DIR, so that the same command can resume it."
        sys.exit(f"error: the training ended with status {status}. {again}")
    return None if resumes else time.perf_counter() - began


def _labels(work: Path, texts: Sequence[str], *, model: str) -> list[str]:
    """Return each text's label from the run's last checkpoint, in the run's dtype."""
    import torch
    from tokenizers import Tokenizer

    checkpoint = max((work / "run" / "checkpoints").glob("step_*"))
    classifier = load(checkpoint).eval()
    assert isinstance(classifier, Classifier)
    in_bf16 = load_trainer_state(checkpoint).dtype == "bf16"
    tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    encoded = [tokenizer.encode(text).ids for text in texts]
    order = sorted(range(len(encoded)), key=lambda index: len(encoded[index]))
    given = [""] * len(order)
    for start in range(0, len(order), _ROWS):
        indices = order[start : start + _ROWS]
        tokens = torch.full((len(indices), len(encoded[indices[-1]])), classifier.pad_token)
        for row, index in enumerate(indices):
            tokens[row, : len(encoded[index])] = torch.tensor(encoded[index])
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=in_bf16):
            chosen = classifier.class_logits(tokens).argmax(-1).tolist()
        for index, number in zip(indices, chosen, strict=True):
            given[index] = classifier.labels[number]
    return given


def _peers(
    train: Sequence[PackageText], measured: Sequence[PackageText]
) -> Iterator[tuple[str, list[str]]]:
    """Yield each TF-IDF regression's name, and its labels at the best regularisation."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_union

    words = {"ngram_range": (1, 2), "sublinear_tf": True}
    letters = {"analyzer": "char_wb", "ngram_range": (2, 5), "sublinear_tf": True}
    expected = np.array([row.label for row in measured])
    for name, features in (
        ("TF-IDF of words", TfidfVectorizer(**words)),
        ("and of letters", make_union(TfidfVectorizer(**words), TfidfVectorizer(**letters))),
    ):
        seen = features.fit_transform([row.text for row in train])
        unseen = features.transform([row.text for row in measured])
        labels = [row.label for row in train]
        tried = (
            LogisticRegression(C=strength, max_iter=2000).fit(seen, labels)
            for strength in _STRENGTHS
        )
        given = (one.predict(unseen) for one in tried)
        yield name, max(given, key=lambda each: (each == expected).sum()).tolist()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
