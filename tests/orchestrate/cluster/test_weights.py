"""A run that starts from weights on the operator's machine."""

from __future__ import annotations

import io
import os

import pytest
from rich.console import Console

from payload.config.run_config import load_run_config
from payload.core.errors import ExitCode
from payload.machines.inventory import ClusterInventory
from payload.orchestrate.machine_profiles.code_and_data_uploads import (
    inspect_nodes,
    local_weights,
    upload_weights,
)
from payload.orchestrate.ssh.cluster import Cluster
from payload.orchestrate.ssh.node_code import this_code
from payload.orchestrate.ssh.remote_calls import Login
from tests.orchestrate.cluster.conftest import STEPS, Trained
from tests.orchestrate.conftest import PATIENT
from tests.support.launching import losses

pytestmark = [pytest.mark.sshd, pytest.mark.ranks]


def test_a_local_checkpoint_is_uploaded_to_the_head_once_and_trained_on(trained: Trained) -> None:
    operator, nodes = trained.operator, trained.operator.nodes
    far = operator.paths("far")
    settings = ("train.steps=1", f"model.init={far.root}")
    code, said = operator.do(*operator.run_words("more", *settings))
    assert code == ExitCode.OK, said
    weights = local_weights(str(far.root))
    assert weights is not None and weights.folder == far.checkpoint(STEPS)
    assert f"weights {weights.folder}: sending" in said.replace("\n", "")
    there = nodes.home_of(0) / "tileforge" / "weights" / weights.digest
    assert {path.name for path in there.iterdir()} == {"model.safetensors", "config.json"}
    assert not (nodes.home_of(1) / "tileforge" / "weights").exists()
    on_head = load_run_config(trained.on_head("../more/run.toml")).model.init
    assert on_head == str(nodes.home / "tileforge" / "weights" / weights.digest)
    here = load_run_config(operator.paths("more").config).model.init
    assert here == str(far.checkpoint(STEPS))
    code, said = operator.do(*operator.local_words("near-more", *settings))
    assert code == ExitCode.OK, said
    begun = losses(operator.paths("more").root)
    assert begun == pytest.approx(losses(operator.paths("near-more").root), rel=1e-5)
    assert begun[0] != pytest.approx(losses(far.root)[0], rel=1e-5)
    # Again: the weights are already on the nodes.
    inventory = ClusterInventory.load(operator.inventory)
    login = Login(user=inventory.ssh_user, key=nodes.key)
    heard = io.StringIO()
    with Cluster(inventory, login=login, env=os.environ, deadlines=PATIENT) as cluster:
        code_here = this_code()
        answers = inspect_nodes(
            inventory.nodes,
            cluster,
            code=code_here,
            programs=["python"],
            data=operator.data,
            weights=weights,
        )
        upload_weights(inventory.head, cluster, answers, weights=weights, talk=Console(file=heard))
    assert heard.getvalue() == ""
