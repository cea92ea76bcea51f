"""Changes of a format that fail, and changes that require a new version."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import formats
from tests.support.formats import assert_format, read_format

KNOWN = {"schema_version": 1, "name": "a", "cost": None, "nodes": [{"cores": 2}], "env": {"A": ""}}
STRICT, SETTINGS = "strict", "settings"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Stores the keys of a document in a golden file."""
    monkeypatch.setattr(formats, "GOLDEN", tmp_path)

    def write(name: str, document: dict[str, Any]) -> None:
        monkeypatch.setenv("TILEFORGE_WRITE_GOLDEN", "1")
        compare(name, document)
        monkeypatch.delenv("TILEFORGE_WRITE_GOLDEN")

    write("record", KNOWN)
    write(STRICT, KNOWN)
    return write


def compare(name: str, document: dict[str, Any]) -> None:
    assert_format(name, [document], maps=("env",), refuses_unknown_keys=name in (STRICT, SETTINGS))


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("name", ["record", STRICT])
def test_the_same_keys_are_no_change(name: str) -> None:
    compare(name, KNOWN | {"name": "b", "nodes": [{"cores": 4}] * 2, "env": {"B": ""}})


BROKEN = {
    "a key is gone": {key: value for key, value in KNOWN.items() if key != "name"},
    "a key of a list's objects is renamed": KNOWN | {"nodes": [{"core_count": 2}]},
    "a key has another type": KNOWN | {"name": 3},
    "a key may be null now": KNOWN | {"nodes": [{"cores": None}]},
    "an object is a list now": KNOWN | {"env": []},
}


@pytest.mark.parametrize("document", BROKEN.values(), ids=BROKEN.keys())
def test_a_change_without_a_version_fails_and_is_not_stored(
    store: Callable[..., None], document: dict[str, Any]
) -> None:
    with pytest.raises(AssertionError, match="Raise its schema_version and keep reading version 1"):
        compare("record", document)
    with pytest.raises(AssertionError, match="Raise its schema_version"):
        store("record", document)
    assert read_format(formats.GOLDEN / "record.json").keys["name"] == "str"


@pytest.mark.parametrize("document", BROKEN.values(), ids=BROKEN.keys())
def test_a_change_with_a_higher_version_is_stored(
    store: Callable[..., None], document: dict[str, Any]
) -> None:
    raised = document | {"schema_version": 2}
    with pytest.raises(AssertionError, match="the version is raised: 1 to 2"):
        compare("record", raised)
    store("record", raised)
    compare("record", raised)
    with pytest.raises(AssertionError, match="the version is not the stored one: 2 to 1"):
        compare("record", document)


def test_a_new_key_is_stored_where_readers_ignore_it(store: Callable[..., None]) -> None:
    more = KNOWN | {"region": "here"}
    with pytest.raises(AssertionError, match=r"region \(str\) is new, and older releases ignore"):
        compare("record", more)
    store("record", more)
    compare("record", more)


def test_a_new_key_needs_a_version_where_readers_refuse_it(store: Callable[..., None]) -> None:
    more = KNOWN | {"region": "here"}
    for act in (compare, store):
        with pytest.raises(AssertionError, match=r"older releases refuse unknown keys. Raise its"):
            act(STRICT, more)


def test_settings_without_a_version_get_new_keys_all_the_same(store: Callable[..., None]) -> None:
    store(SETTINGS, {"train": {"steps": 1}})
    more = {"train": {"steps": 1, "later": True}}
    with pytest.raises(AssertionError, match=r"later \(bool\) is new, and older releases refuse"):
        compare(SETTINGS, more)
    store(SETTINGS, more)
    compare(SETTINGS, more)


def test_a_key_that_was_always_null_may_get_a_value(store: Callable[..., None]) -> None:
    dear = KNOWN | {"cost": 0.5}
    with pytest.raises(AssertionError, match=r"cost \(float\) is new"):
        compare("record", dear)
    store("record", dear)
    assert read_format(formats.GOLDEN / "record.json").keys["cost"] == "float | null"
    compare("record", KNOWN)


def test_a_format_without_a_version_keeps_its_keys(store: Callable[..., None]) -> None:
    store("row", {"step": 1, "loss": 2.0})
    for act in (compare, store):
        with pytest.raises(AssertionError, match="It has no version: write the old key too, or"):
            act("row", {"step": 1, "train_loss": 2.0})
    store("row", {"schema_version": 1, "step": 1, "train_loss": 2.0})
