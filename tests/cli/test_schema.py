"""`schema`: the same values are valid for an editor and for a run."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from payload.__main__ import _run
from payload.config.json_schema import SCHEMAS, run_schema, schema_file, schema_line, schema_text
from payload.config.run_config import RunConfig, parse_run_config
from payload.config.setting_reference import Setting, all_settings, sections
from payload.config.settings import parse_sections
from payload.core.errors import ConfigError, ExitCode
from payload.finetune.__main__ import _require_unedited
from payload.machines.inventory import ClusterInventory
from payload.machines.machine import discover
from tests.support.json_schema import is_valid

CONFIGS = sorted((Path(__file__).parents[2] / "payload" / "configs").glob("*.toml"))
INVENTORY = json.loads(schema_text("inventory"))


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    """Return the schema of run.toml as an editor reads it."""
    found: dict[str, Any] = json.loads(schema_text("run"))
    assert found == run_schema()
    return found


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_packaged_schema_is_the_printed_one(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert schema_file(name).read_text(encoding="utf-8") == schema_text(name), "run make docs"
    assert _run(["schema", name]) == ExitCode.OK
    assert capsys.readouterr().out == schema_text(name)
    assert _run(["schema", name, "--out", str(tmp_path / "x.json")]) == ExitCode.OK
    assert (tmp_path / "x.json").read_text(encoding="utf-8") == schema_text(name)
    assert capsys.readouterr().out == ""


def test_a_file_that_cannot_be_written_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(["schema", "--out", str(tmp_path)]) == ExitCode.USAGE
    assert capsys.readouterr().err.startswith(f"error: --out {tmp_path}: ")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_config_names_the_schema_and_is_valid(
    path: Path, schema: dict[str, Any]
) -> None:
    text = path.read_text(encoding="utf-8")
    named = re.match(r"#:schema (\S+)\n", text)
    assert named and path.parent / named[1] == schema_file("run")
    assert is_valid(schema, tomllib.loads(text))


def test_the_defaults_are_valid_and_unknown_names_are_not(schema: dict[str, Any]) -> None:
    assert is_valid(schema, {}) and is_valid(schema, tomllib.loads(RunConfig().to_toml()))
    assert not is_valid(schema, {"trian": {}})
    assert not is_valid(schema, {"train": {"step": 1}})
    assert not is_valid(schema, {"train": 5})


def probes(setting: Setting) -> Iterator[Any]:
    """Yield values of every type, and values around each limit."""
    yield from (True, -1, 0, 1, 2.5, 1e300, 2**53, 2**53 + 1, 2**63, -(2**63) - 1)
    yield from ("auto", "none", "bf16", "x", "", "a\x00b", "a\nb", "a\x1b[2Jb", "x" * 70_000)
    yield from ([], ["x"], [1], {}, setting.default_text().strip('"'))
    yield from setting.words()
    for limit in ("low", "above", "high"):
        bound = setting.limits.get(limit)
        if bound is not None:
            step = 1 if isinstance(bound, int) else abs(bound) / 1000 + 1e-9
            yield from (bound - step, bound, bound + step)


def reads(setting: Setting, value: Any) -> bool:
    """Return whether a run reads the value, whatever the other settings are."""
    text = f"[{setting.section}]\n{setting.key} = {json.dumps(value)}"
    try:
        parse_sections(RunConfig, text, overrides=(), where="test")
    except ConfigError:
        return False
    return True


def is_one_number_in_json(setting: Setting, value: Any) -> bool:
    """Return whether JSON has no difference between this value and one that is right.

    A run keeps 5 and 5.0 apart, and refuses an integer that a float cannot represent.
    """
    if setting.plain_kind() is int:
        return isinstance(value, float) and value.is_integer()
    return setting.plain_kind() is float and type(value) is int and abs(value) > 2**53


@pytest.mark.parametrize("setting", all_settings().values(), ids=all_settings())
def test_the_schema_accepts_what_a_run_reads_and_nothing_else(
    setting: Setting, schema: dict[str, Any]
) -> None:
    values = [each for each in probes(setting) if not is_one_number_in_json(setting, each)]
    accepted = [is_valid(schema, {setting.section: {setting.key: each}}) for each in values]
    assert accepted == [reads(setting, each) for each in values]
    assert True in accepted and False in accepted


def test_every_setting_has_a_title_a_description_a_default_and_values(
    schema: dict[str, Any],
) -> None:
    for section in sections().values():
        for each in section.settings:
            found = schema["properties"][section.name]["properties"][each.key]
            assert found["title"] == each.name
            assert each.meaning and found["description"].startswith(each.meaning)
            assert is_valid(found, found["default"])
            assert {"type", "enum", "anyOf"} & set(found)
    assert schema["properties"]["limits"]["properties"]["max_usd"]["x-unit"] == "US dollars"


def test_a_number_whose_name_tells_a_unit_has_this_unit() -> None:
    named = {"_s": "seconds", "_hours": "hours", "_usd": "US dollars", "_steps": "steps"}
    named |= {"_tokens": "tokens", "_every": "steps"}
    units = {
        each.name: (unit, each.unit)
        for each in all_settings().values()
        for end, unit in named.items()
        if each.key.endswith(end) and each.hint is not str
    }
    assert len(units) >= 10 and all(wanted == found for wanted, found in units.values()), units


@pytest.mark.parametrize("where", ["a", "it's", "a b"])
def test_the_line_for_files_elsewhere_is_a_comment_with_the_schema_s_path(where: str) -> None:
    path = Path(schema_line().removeprefix("#:schema ").rstrip("\n"))
    assert path.is_absolute() and path == schema_file("run")
    text = schema_line().replace(str(path), f"/{where}/run.schema.json") + "[train]\nsteps = 7\n"
    assert parse_run_config(text, where="test").train.steps == 7


def test_a_file_of_another_installation_does_not_count_as_edited(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text("#:schema /other/run.schema.json\n# Chosen\n", encoding="utf-8")
    _require_unedited(config, "#:schema /this/run.schema.json\n# Chosen\n", force=False)
    with pytest.raises(ConfigError, match="may have been edited"):
        _require_unedited(config, "#:schema /other/run.schema.json\n# Other\n", force=False)


@pytest.mark.parametrize(
    ("change", "is_right"),
    [
        ({}, True),
        ({"bucket": "x-y"}, True),
        ({"schema_version": 2}, False),
        ({"nodes": [{"name": "-o", "address": "a", "physical_cores": 1, "memory_gib": 1}]}, False),
        ({"nodes": [{"name": "a", "address": "a", "physical_cores": 0, "memory_gib": 1}]}, False),
        ({"nodes": [{"name": "a", "address": "a", "physical_cores": 1}]}, False),
        ({"source": "other"}, False),
        ({"colour": "red"}, False),
        ({"bucket": 5}, False),
    ],
)
def test_the_inventory_s_schema_accepts_what_is_read(
    change: dict[str, Any], is_right: bool
) -> None:
    raw = json.loads(discover().inventory().to_json()) | change
    try:
        ClusterInventory.from_json(json.dumps(raw), where="test")
        is_read = True
    except ConfigError:
        is_read = False
    assert is_valid(INVENTORY, raw) == is_read == is_right
