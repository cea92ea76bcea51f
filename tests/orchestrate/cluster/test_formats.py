"""No file that an operator keeps of a cluster's run changes without its version."""

from __future__ import annotations

import json

import pytest

from tests.orchestrate.cluster.conftest import Trained
from tests.support.formats import assert_format, assert_keys, names_in

pytestmark = [pytest.mark.sshd, pytest.mark.ranks]


def test_the_copy_of_a_run_and_the_trial_of_its_cluster(trained: Trained) -> None:
    copy = trained.operator.paths("far").root
    assert_format("mirror", [json.loads((copy / "mirror.json").read_text(encoding="utf-8"))])
    named = json.loads((copy / "named.json").read_text(encoding="utf-8"))
    assert_format("named", [named], maps=("settings",))
    assert_keys("names.copy", names_in(copy), version=None)
    trial = trained.operator.folder / ".cluster" / "test" / "trial.json"
    found = json.loads(trial.read_text(encoding="utf-8"))
    alone = {"measured.nodes{}.received_bytes_per_s": "null"}
    maps = ("interfaces", "measured.nodes")
    assert_format("trial", [found], maps=maps, also=alone)
