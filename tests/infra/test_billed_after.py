"""Names what is billed on after a lifetime or a limit, next to each setting."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml

from infra.config import ClusterConfig
from infra.cost import cost_of, describe
from payload.config.launch_sections import LimitsSection
from payload.config.run_config import RunConfig
from payload.machines.inventory import Source
from payload.orchestrate.runs.at_risk import limit_note
from payload.stack.billed_resources import BILLED_ON, BILLED_RESOURCES
from tests.infra.stacks import ROOT


def test_the_settings_of_lifetime_and_price_say_what_they_do_not_stop() -> None:
    settings = yaml.safe_load((ROOT / "Pulumi.yaml").read_text(encoding="utf-8"))["config"]
    assert BILLED_RESOURCES in settings["maxLifetime"]["description"]
    assert "does not limit the total" in settings["maxHourlyUsd"]["description"]


def test_a_preview_says_what_the_lifetime_does_not_end() -> None:
    config = ClusterConfig(cluster="dev", project="my-project")
    known = describe(config, cost_of(config), speed=None)
    assert BILLED_ON in known.splitlines()


@pytest.mark.parametrize(
    ("source", "limits", "key"),
    [
        ("pulumi", LimitsSection(max_usd=5.0), "max_usd"),
        ("pulumi", LimitsSection(max_hours=2.0), "max_hours"),
        ("pulumi", LimitsSection(), None),
        ("local", LimitsSection(max_usd=5.0), None),
        ("slurm", LimitsSection(max_hours=2.0), None),
    ],
)
def test_a_run_with_a_limit_says_that_its_machines_are_billed_on(
    source: Source, limits: LimitsSection, key: str | None
) -> None:
    note = limit_note(source, replace(RunConfig(), limits=limits))
    if key is None:
        assert note is None
    else:
        assert note is not None and f"limits.{key} stops the run, not its machines" in note
        assert note.endswith(" down")
