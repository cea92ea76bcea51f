"""A model that learns Debian's sections from package descriptions, against TF-IDF features.

    python -m benchmarks.classify --model FOLDER [--config TOML] [--set KEY=VALUE]
    python -m benchmarks.classify --model FOLDER --on validation --texts 2000
    python -m benchmarks.classify --peers --split texts --held-out 3000

The labels are the sections with the most packages. `--sections topics` leaves out the sections that
say how a package is built or in which language (libdevel, python, doc, ...): single words give
these away ("development files"), while a topic takes some knowledge of the world.

Texts to learn from, to choose a recipe by (`--on validation`) and to measure it on once are of
different source packages. With `--split texts` they are not: a third of the held-out texts then
have a text of the same source among the trained ones, from which they often differ by a word.
`--peers` trains the peers alone and tells these two kinds of texts apart.

The peer is scikit-learn's logistic regression, on the same texts. Its regularisation is the one
that is best on the measured texts, which favours it. The standard error of the margin is that of
paired texts, clustered by source package, and its p-value that of a normal distribution.
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

from benchmarks.machine import describe_machine
from benchmarks.package_texts import FORMS, PackageText, Parts, divide, packages, write_csv
from benchmarks.tables import Table
from payload.train.checkpoints.checkpoint import load_trainer_state
from payload.train.models.classifier import Classifier
from payload.train.models.loading import load

LABELS = 12
TEXTS = 8_000
VALIDATION, HELD_OUT = 2_000, 10_000
ENDING = " Debian section:"
"""Each text's last words: the label is read off the last token, and this one asks for it. What it
gains was not measured by itself."""
CONFIG = Path("payload/configs/classify.toml")
_ROWS = 64
_OWN_VALIDATION = 0.01
"""Share of the texts to learn from that `prepare` sets aside for the run's own evaluations."""
_OURS = "tileforge"
_STRENGTHS = (3.0, 10.0, 30.0, 100.0)
"""Inverse regularisation of the logistic regression."""
_FEWEST_SOURCES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Margin:
    """Difference of two classifiers' accuracies on the same texts."""

    points: float
    standard_error: float
    """In points, of the difference on paired texts, clustered by source."""
    p: float
    """Two-sided, of a normal distribution."""

    @classmethod
    def of(cls, ours: Sequence[bool], theirs: Sequence[bool], sources: Sequence[str]) -> Margin:
        """Compare which texts each has right.

        Texts of one source are right or wrong together ("NAME documentation"), so only sources
        count as independent of each other.
        """
        gains = np.array(ours, dtype=float) - np.array(theirs, dtype=float)
        mean, count = float(gains.mean()), len(gains)
        names, cluster = np.unique(np.array(sources), return_inverse=True)
        if len(names) < _FEWEST_SOURCES:
            raise ValueError(f"{len(names)} source(s) tell no standard error")
        sums = np.bincount(cluster, weights=gains - mean)
        spread = float((sums**2).sum()) * len(names) / (len(names) - 1)
        error = math.sqrt(spread) / count
        p = math.erfc(abs(mean) / error / math.sqrt(2)) if mean else 1.0
        return cls(points=100 * mean, standard_error=100 * error, p=p)


def main(argv: Sequence[str]) -> int:
    """Prepare the texts, train both, print the margins."""
    arguments = _parser().parse_args(argv)
    parts = _parts(arguments)
    measured = parts.validation if arguments.on == "validation" else parts.held_out
    if arguments.peers:
        return _report_peers(parts.train, measured)
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
    result: dict[str, Any] = {
        "benchmark": "classify",
        "machine": describe_machine(),
        "texts": len(parts.train),
        "measured": len(measured),
        "on": arguments.on,
        "labels": arguments.labels,
        "sections": arguments.sections,
        "split": arguments.split,
        "train_s": None if took_s is None else round(took_s, 1),
    }
    return _report(result, measured, ours, dict(_peers(parts.train, measured)))


def _parts(arguments: argparse.Namespace) -> Parts:
    """Return the texts that the options ask for."""
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
    result: dict[str, Any],
    measured: Sequence[PackageText],
    ours: list[str],
    peers: dict[str, list[str]],
) -> int:
    """Print the accuracies and margins; return 0 when the model beats the stronger peer."""
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


def _report_peers(train: Sequence[PackageText], measured: Sequence[PackageText]) -> int:
    """Print the peers' accuracies, by whether a text's source has texts to learn from."""
    known = {row.source for row in train}
    shared = np.array([row.source in known for row in measured])
    wanted = np.array([row.label for row in measured])
    columns = ("accuracy", "shared source", "other sources")
    table = Table(*columns, labels=("TF-IDF of words",))
    found: dict[str, dict[str, float | None]] = {}
    for name, given in _peers(train, measured):
        right = np.array(given) == wanted
        chosen = (right, right[shared], right[~shared])
        shares = [float(each.mean()) if len(each) else None for each in chosen]
        table.row(name, *("" if each is None else f"{each:.2%}" for each in shares))
        found[name] = dict(zip(columns, shares, strict=True))
    numbers = {"texts": len(train), "measured": len(measured), "shared": float(shared.mean())}
    print(json.dumps({"benchmark": "classify", **numbers, "peers": found}))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.classify",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    measures = parser.add_mutually_exclusive_group(required=True)
    measures.add_argument("--model", metavar="DIR", help="language model to begin with")
    measures.add_argument("--peers", action="store_true", help="train the peers alone")
    _add_texts(parser.add_argument)
    add("--config", type=Path, default=CONFIG, metavar="TOML", help="recipe (default: %(default)s)")
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="sets",
        help="a setting in place of the recipe's; may be repeated (default: none)",
    )
    add(
        "--work",
        type=Path,
        metavar="DIR",
        help="folder to keep data and run in; the same command goes on with a run that was stopped "
        "(default: a temporary one)",
    )
    return parser


def _add_texts(add: Callable[..., Any]) -> None:
    """Declare which texts are learned from and measured on."""

    def count(flag: str, default: int, what: str) -> None:
        add(
            flag,
            type=int,
            default=default,
            metavar="COUNT",
            help=f"{what} (default: {default:,})",
        )

    count("--labels", LABELS, "labels, the sections with the most packages")
    add(
        "--sections",
        choices=("all", "topics"),
        default="all",
        help="all, or those alone that name a topic (default: %(default)s)",
    )
    count("--texts", TEXTS, "texts to learn from")
    count("--validation", VALIDATION, "texts to choose a recipe by")
    count("--held-out", HELD_OUT, "texts to measure the chosen recipe on")
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
        help="keep a source package's texts in one part, or divide text by text (default: "
        "%(default)s)",
    )
    add(
        "--ending",
        default=ENDING,
        metavar="TEXT",
        help="put after each description (default: '%(default)s')",
    )


def _prepare(work: Path, *, model: str) -> None:
    words = ["--task", "classify", "--source", "csv", "--input", str(work / "texts.csv")]
    words += ["--tokenizer", model, "--val-fraction", str(_OWN_VALIDATION)]
    _run_quietly("payload.data", "prepare", *words, "--out", str(work / "data"), "--quiet")


def _run_quietly(*words: str) -> None:
    """Run a module whose results are not this program's."""
    subprocess.run([sys.executable, "-m", *words], check=True, stdout=sys.stderr)


def _train(work: Path, *, config: Path, sets: Sequence[str], keeps: bool) -> float | None:
    """Return the seconds that the run took; None where it went on from an earlier call's.

    `keeps` says whether `work` stays. Exits with an error where the run is stopped.
    """
    goes_on = any((work / "run" / "checkpoints").glob("step_*"))
    words = [word for each in (f"data.dir={work / 'data'}", *sets) for word in ("--set", each)]
    began = time.perf_counter()
    where = ("--config", str(config), "--run-dir", str(work / "run"))
    _run_quietly("payload.train", *where, *words)
    status = json.loads((work / "run" / "summary.json").read_text())["status"]
    if status != "finished":
        again = "Run the same command again: it goes on from the last checkpoint."
        if not keeps:
            again = "Run it again with --work DIR, which keeps data and run for a further call."
        sys.exit(f"error: the training ended as {status}, so nothing was measured. {again}")
    return None if goes_on else time.perf_counter() - began


def _labels(work: Path, texts: Sequence[str], *, model: str) -> list[str]:
    """Return the label that the run's last checkpoint gives each text, in the run's own dtype."""
    import torch
    from tokenizers import Tokenizer

    checkpoint = max((work / "run" / "checkpoints").glob("step_*"))
    classifier = load(checkpoint).eval()
    assert isinstance(classifier, Classifier)
    in_bf16 = load_trainer_state(checkpoint).dtype == "bf16"
    tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    encoded = [tokenizer.encode(text).ids for text in texts]
    order = sorted(range(len(encoded)), key=lambda place: len(encoded[place]))
    given = [""] * len(order)
    for start in range(0, len(order), _ROWS):
        places = order[start : start + _ROWS]
        tokens = torch.full((len(places), len(encoded[places[-1]])), classifier.pad_token)
        for row, place in enumerate(places):
            tokens[row, : len(encoded[place])] = torch.tensor(encoded[place])
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=in_bf16):
            chosen = classifier.class_logits(tokens).argmax(-1).tolist()
        for place, number in zip(places, chosen, strict=True):
            given[place] = classifier.labels[number]
    return given


def _peers(
    train: Sequence[PackageText], measured: Sequence[PackageText]
) -> Iterator[tuple[str, list[str]]]:
    """Yield the labels by logistic regression on TF-IDF features, each at its best."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_union

    words = {"ngram_range": (1, 2), "sublinear_tf": True}
    letters = {"analyzer": "char_wb", "ngram_range": (2, 5), "sublinear_tf": True}
    wanted = np.array([row.label for row in measured])
    for name, features in (
        ("TF-IDF of words", TfidfVectorizer(**words)),
        ("and of letters", make_union(TfidfVectorizer(**words), TfidfVectorizer(**letters))),
    ):
        known = features.fit_transform([row.text for row in train])
        unknown = features.transform([row.text for row in measured])
        labels = [row.label for row in train]
        tried = (
            LogisticRegression(C=strength, max_iter=2000).fit(known, labels)
            for strength in _STRENGTHS
        )
        given = (one.predict(unknown) for one in tried)
        yield name, max(given, key=lambda each: (each == wanted).sum()).tolist()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
