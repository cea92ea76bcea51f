"""README and the other pages: their commands exist, links have targets, tables are correct."""

from __future__ import annotations

import functools
import itertools
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Set
from pathlib import Path

import pytest

from payload.cli.commands import BY_NAME
from payload.config.run_config import RunConfig, load_run_config
from payload.core.errors import ExitCode
from payload.orchestrate.__main__ import main as orchestrate
from tests.support.comparison import read_tools
from tests.support.config_reference import CLUSTER_SECTIONS, MEANINGS, README, TABLES, with_tables
from tests.support.config_reference import PAGES as TABLE_PAGES

ROOT = README.parent
REFERENCE = ROOT / "docs" / "reference"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

_FENCE = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^]]*\]\(([^)\s]+)\)")
_BENCHMARK_ROW = re.compile(r"^\| `(\w+)` \|", re.MULTILINE)
_LISTED_FILE = re.compile(r"^```python\n# (\w+\.py)$", re.MULTILINE)
_MAKE_TARGET = re.compile(r"^([a-z][a-z-]*):", re.MULTILINE)
_ELSEWHERE = frozenset(
    {"git", "cd", "source", "accelerate", "export", "gcloud", "pulumi", "curl", "pip", "lm_eval"}
    | {"cat", "hf"}
)
MOST_README_BYTES = 8_000
MOST_REFERENCE_BYTES = 12_000


def commands(page: Path) -> list[str]:
    """Return each command of a page's bash blocks."""
    blocks = "".join(_FENCE.findall(page.read_text(encoding="utf-8")))
    lines = blocks.replace("\\\n", " ").splitlines()
    return [part.strip() for line in lines for part in line.split("&&") if part.strip()]


HelpOf = Callable[..., str]

_HELPER = """
import contextlib, io, json, runpy, sys
for line in sys.stdin:
    module, *words = json.loads(line)
    full = "--help-all" if module.startswith("payload") else "--help"
    sys.argv = [module, *words, full]
    out, status = io.StringIO(), None
    with contextlib.redirect_stdout(out):
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            status = end.code
    print(json.dumps([status or 0, out.getvalue()]), flush=True)
"""
"""Prints the help of every program from one process, as most of them import torch."""


@pytest.fixture(scope="module")
def help_of() -> Iterator[HelpOf]:
    """Returns the full help of `python -m PROGRAM...`: help_of("payload.data", "prepare")."""
    with subprocess.Popen(
        [sys.executable, "-c", _HELPER],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as helper:
        assert helper.stdin is not None and helper.stdout is not None
        asked, answers = helper.stdin, helper.stdout

        @functools.cache
        def ask(*program: str) -> str:
            print(json.dumps(program), file=asked, flush=True)
            status, shown = json.loads(answers.readline())
            assert status == 0
            return str(shown)

        yield ask
        asked.close()


def listed_files(page: Path) -> set[str]:
    """Return the names of the Python files that a page lists, from their first lines."""
    return set(_LISTED_FILE.findall(page.read_text(encoding="utf-8")))


def problem_with(command: str, help_of: HelpOf, *, files: Set[str] = frozenset()) -> str | None:
    """Return why a command of a page, which lists `files`, cannot be run as printed, or None."""
    words = shlex.split(command, comments=True)
    if not words or words[0] in _ELSEWHERE:
        return None
    if words[0] == "make":
        targets = set(_MAKE_TARGET.findall((ROOT / "Makefile").read_text(encoding="utf-8")))
        unknown = [word for word in words[1:] if "=" not in word and word not in targets]
        return (
            f"no make target {unknown[0]}" if unknown else _problem_with_benchmark(words, help_of)
        )
    if words[0] == "tileforge":
        return _problem_with_module(["payload", *words[1:]], help_of)
    if words[0] == "bash":
        return None if (ROOT / words[1]).is_file() else f"no file {words[1]}"
    if words[0].removeprefix(".venv/bin/") in {"python", "torchrun"} and "-m" in words:
        program = words[words.index("-m") + 1 :]
        return None if program[0] in _ELSEWHERE else _problem_with_module(program, help_of)
    if words[0] == "python":
        return None if words[1] in files else f"no file {words[1]} on the page"
    return f"unknown program {words[0]}"


def _problem_with_benchmark(words: list[str], help_of: HelpOf) -> str | None:
    """Return the problem with `make bench BENCH=NAME ARGS="..."`, or None."""
    given = dict(word.split("=", 1) for word in words if "=" in word)
    if "BENCH" not in given:
        return None
    words = [f"benchmarks.{given['BENCH']}", *given.get("ARGS", "").split()]
    return _problem_with_module(words, help_of)


def _problem_with_module(words: list[str], help_of: HelpOf) -> str | None:
    module, *rest = words
    path = ROOT.joinpath(*module.split("."))
    if not (path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()):
        return f"no module {module}"
    shown = help_of(module)
    takes_file = re.search(r"(?m)^  [A-Z]+ ", shown) is not None
    if rest and not rest[0].startswith("-") and not takes_file:
        if module == "payload":
            is_known = rest[0] in BY_NAME
        else:
            name = re.escape(rest[0])
            is_known = re.search(rf"(?m)^\s+{name}\b|[{{,]{name}[,}}]", shown) is not None
        if not is_known:
            return f"{module} has no command {rest[0]}"
        shown = help_of(module, rest[0])
    flags = [word.split("=")[0] for word in rest if re.match(r"--?[a-z]", word)]
    unknown = [flag for flag in flags if not re.search(rf"(?<![\w-]){flag}(?![\w-])", shown)]
    return f"{module} has no option {unknown[0]}" if unknown else None


@pytest.mark.processes
@pytest.mark.parametrize(
    ("page", "command"),
    [
        pytest.param(page, command, id=f"{page.name}: {command}")
        for page in PAGES
        for command in commands(page)
    ],
)
def test_a_command_can_be_typed_as_it_is(page: Path, command: str, help_of: HelpOf) -> None:
    assert problem_with(command, help_of, files=listed_files(page)) is None


@pytest.mark.processes
@pytest.mark.parametrize(
    "command",
    [
        "make nothing-of-this-name",
        "make bench BENCH=nothing",
        'make bench BENCH=memory ARGS="--casse gpt2:8"',
        "python -m benchmarks.stepp --model gpt2",
        "python -m benchmarks.step --modle gpt2",
        "python -m payload.generate --chekpoint x",
        "python -m payload.data perpare",
        "python -m payload.data prepare --sauce text",
        "torchrun -m payload.train --confg x",
        "pyhton -m payload.train",
        "bash bootstrap/none.sh",
        "python none.py",
        "tileforge nothing",
        "tileforge show runs/latest",
        ".venv/bin/python -m none",
    ],
)
def test_a_wrong_command_is_found(command: str, help_of: HelpOf) -> None:
    assert problem_with(command, help_of)


def test_every_benchmark_is_in_the_table() -> None:
    files = [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "benchmarks").glob("*/__main__.py")]
    names = {path: path.parent.name if path.stem == "__main__" else path.stem for path in files}
    commands = {
        name
        for path, name in names.items()
        if f"python -m benchmarks.{name} " in path.read_text(encoding="utf-8")
    }
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = _BENCHMARK_ROW.findall(text.partition("## Benchmarks")[2].partition("\n## ")[0])
    assert len(rows) == len(set(rows)) and set(rows) == commands


def job_on_a_cluster(command: str) -> list[str] | None:
    """Return the settings of a command for a run on several machines; None for other commands."""
    words = shlex.split(command, comments=True)
    starts = {"plan", "preflight", "run"} & set(words)
    if "payload.orchestrate" not in words or not starts or "--config" not in words:
        return None
    if "--inventory" not in words or words[words.index("--inventory") + 1] == "local":
        return None
    pairs = itertools.pairwise(words)
    return [word for pair in pairs if pair[0] in ("--config", "--set") for word in pair]


CLUSTER_JOBS = {
    " ".join(job): job
    for page in PAGES
    for command in commands(page)
    if (job := job_on_a_cluster(command)) is not None
}


@pytest.mark.parametrize("job", CLUSTER_JOBS.values(), ids=CLUSTER_JOBS)
def test_a_run_on_a_cluster_goes_with_the_default_cluster(
    job: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [
        {"name": f"node-{i}", "address": f"10.0.0.{i + 2}", "physical_cores": 4, "memory_gib": 64}
        for i in range(3)  # of c3-highmem-8
    ]
    inventory = {"schema_version": 1, "cluster": "mine", "source": "file", "ssh_user": "trainer"}
    inventory |= {"access": {"kind": "direct"}, "bucket": None, "nodes": nodes}
    path = tmp_path / "inventory.json"
    path.write_text(json.dumps(inventory), encoding="utf-8")
    monkeypatch.chdir(ROOT)
    assert orchestrate(["plan", "--inventory", str(path), *job], {}) == ExitCode.OK


def test_the_config_for_fine_tuning_goes_with_most_clusters() -> None:
    batch = load_run_config(ROOT / "payload" / "configs" / "gpt2_finetune.toml").batch
    assert [batch.grad_accum_steps(ranks) for ranks in (1, 2, 3, 4, 6, 12)] == [12, 6, 4, 3, 2, 1]


@functools.cache
def headings(page: Path) -> set[str]:
    """Return the valid targets of links within a page."""
    lines = page.read_text(encoding="utf-8").splitlines()
    return {
        re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-")
        for line in lines
        if line.startswith("#")
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.name))
def test_links_within_the_repository_lead_somewhere(page: Path) -> None:
    broken = []
    for link in _LINK.findall(page.read_text(encoding="utf-8")):
        path, _, heading = link.partition("#")
        target = page.parent / path if path else page
        if "://" in link or (target.exists() and not heading):
            continue
        if not (target.is_file() and heading in headings(target)):
            broken.append(link)
    assert broken == []


MOST_WORDS = 40
_BANNED = re.compile(r"\b(anew|mend|mends|mended)\b", re.IGNORECASE)
_NO_PROSE = ("|", "#", "<!--")
_LIST_ITEM = re.compile(r"^\s*([-*]|\d+\.)\s")
_SENTENCE_END = re.compile(r"[.!?](?:\*\*|[)\"])*\s+(?=[A-Z`\[\"*(0-9])")


def sentences(text: str) -> list[str]:
    """Return the sentences of a page's paragraphs and lists, with `code` for each code span."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    paragraphs = [""]
    for line in prose.splitlines():
        if not line.strip() or line.startswith(_NO_PROSE) or _LIST_ITEM.match(line):
            paragraphs.append("")
        if not line.startswith(_NO_PROSE):
            paragraphs[-1] += f"{_LIST_ITEM.sub('', line)}\n"
    plain = [re.sub(r"`[^`]*`", "`code`", each) for each in paragraphs]
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", each) for each in plain]
    return [each for paragraph in plain for each in _SENTENCE_END.split(paragraph)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.name))
def test_a_page_has_no_sentence_that_takes_two_breaths(page: Path) -> None:
    found = sentences(page.read_text(encoding="utf-8"))
    assert [each for each in found if len(re.findall(r"\S*\w\S*", each)) > MOST_WORDS] == []
    assert [each for each in found if _BANNED.search(each)] == []


def test_a_sentence_ends_at_its_full_stop_a_list_item_or_a_table() -> None:
    text = (
        "# Head\nOne `a. b`. Two\ngoes on:\n\n- three\n- four.\n\n```bash\nno\n```\n| no |\nFive.\n"
    )
    assert [each.split() for each in sentences(text) if each.strip()] == [
        ["One", "`code`"],
        ["Two", "goes", "on:"],
        ["three"],
        ["four."],
        ["Five."],
    ]


def test_the_tables_are_what_the_code_says() -> None:
    texts = [page.read_text(encoding="utf-8") for page in TABLE_PAGES]
    assert texts == [with_tables(text) for text in texts], "run: make docs"
    assert set(MEANINGS) == set(ExitCode)
    for name in TABLES:
        assert sum(f"<!-- {name} end -->" in text for text in texts) == 1


def test_every_section_of_settings_is_on_one_page_of_the_reference() -> None:
    pages = [REFERENCE / f"settings_{name}.md" for name in ("training", "machines")]
    training, machines = (headings(page) for page in pages)
    names = set(RunConfig.__dataclass_fields__)
    assert names - CLUSTER_SECTIONS <= training and machines >= CLUSTER_SECTIONS
    assert not names & training & machines


def test_the_readme_and_the_reference_are_short() -> None:
    assert README.stat().st_size <= MOST_README_BYTES
    tables = [page for page in TABLE_PAGES if page.parent == REFERENCE]
    assert [page.name for page in tables if page.stat().st_size > MOST_REFERENCE_BYTES] == []


def test_every_claim_of_the_comparison_has_a_source() -> None:
    rows = [row for tool in read_tools() for row in tool["row"]]
    assert rows and [row for row in rows if not row["source"].strip()] == []


@pytest.mark.parametrize(
    "path", sorted((ROOT / "payload" / "configs").glob("*.toml")), ids=lambda path: str(path.name)
)
def test_every_shipped_config_is_valid(path: Path) -> None:
    assert load_run_config(path)


def test_the_release_of_the_changelog_is_the_code_s() -> None:
    from payload import __version__

    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## \[?([\w.]+)", text, re.MULTILINE)[:2] == ["Unreleased", __version__]
