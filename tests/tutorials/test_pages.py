"""The parts of a page that the tests run and compare."""

from __future__ import annotations

from pathlib import Path

import pytest

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


@pytest.mark.parametrize("name", TABLE)
def test_the_table_fits_the_page(name: str) -> None:
    page = read_page(ROOT / name if name == "README.md" else TUTORIALS / name)
    assert script(page, TABLE[name], tiny="TINY", project="PROJECT")
    assert TABLE[name].varies <= set(page.outputs)
