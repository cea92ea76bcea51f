"""The parts of a page that the tests run and compare."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from payload.core.errors import ExitCode
from payload.orchestrate.__main__ import main
from tests.tutorials.pages import ROOT, TUTORIALS, Reduced, missing_lines, read_page, script
from tests.tutorials.substitutions import TABLE

MOST_BYTES = 8_000
PAGE = """# A page

```bash
make thing
tool --steps 60 \\
    --out DIR
```

```text
step 60: loss 1.25
```

## Other

```text
no output
```

```python
# made.py
print()
```
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "page.md"
    made.write_text(PAGE, encoding="utf-8")
    return made


def test_a_page_has_commands_outputs_and_files(path: Path) -> None:
    page = read_page(path)
    assert [" ".join(each.split()) for each in page.commands] == [
        "make thing",
        "tool --steps 60 --out DIR",
    ]
    assert page.outputs == ("step 60: loss 1.25",)
    assert list(page.files) == ["made.py"]


def test_the_script_has_every_command_that_the_table_does_not_leave_out(path: Path) -> None:
    reduced = Reduced(replace={"60": "{few}"}, skip={"make thing": "slow"})
    text = script(read_page(path), reduced, few="2")
    assert "--steps 2" in text and "make thing" not in text


@pytest.mark.parametrize("reduced", [Reduced(replace={"x9": "y"}), Reduced(skip={"x9": "why"})])
def test_a_replacement_that_no_command_needs_is_found(path: Path, reduced: Reduced) -> None:
    with pytest.raises(AssertionError, match="x9"):
        script(read_page(path), reduced)


def test_an_expected_line_is_found_whatever_its_numbers(path: Path) -> None:
    page = read_page(path)
    assert missing_lines(page, Reduced(), "step 2: loss  1,000.5e-05") == []
    assert missing_lines(page, Reduced(), "step 2: gain 1.5") == list(page.outputs)
    assert missing_lines(page, Reduced(varies=frozenset(page.outputs)), "") == []


def test_every_tutorial_is_in_the_table_and_short() -> None:
    pages = sorted(TUTORIALS.glob("*.md"))
    assert sorted(TABLE) == sorted([*(page.name for page in pages), "README.md"])
    assert [page.name for page in pages if page.stat().st_size > MOST_BYTES] == []


def test_the_first_job_of_the_slurm_page_only_lacks_sbatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "payload").symlink_to(ROOT / "payload")
    lines = [shlex.split(each) for each in read_page(TUTORIALS / "slurm.md").commands]
    (words,) = [
        each[1:] for each in lines if each[1:3] == ["run", "payload/configs/quickstart.toml"]
    ]
    assert {"--site", "slurm", "slurm.nodes=2"} <= set(words)
    assert main(words, {"PATH": str(tmp_path)}) == ExitCode.PREFLIGHT
    assert capsys.readouterr().err.startswith("error: no sbatch on PATH")


def test_every_page_names_the_cluster_whose_removal_sweep_checks() -> None:
    """Without a name, `sweep` finds nothing while the cluster's lifetime lasts."""
    pages = sorted((ROOT / "docs").rglob("*.md"))
    lines = [line for page in pages for line in read_page(page).commands]
    swept = [line for line in lines if "sweep" in line.split()]
    assert len(swept) >= 3 and [line for line in swept if "--cluster" not in line] == []


@pytest.mark.parametrize("name", TABLE)
def test_the_table_fits_the_page(name: str) -> None:
    page = read_page(ROOT / name if name == "README.md" else TUTORIALS / name)
    assert script(page, TABLE[name], tiny="TINY", project="PROJECT")
    assert TABLE[name].varies <= set(page.outputs)
