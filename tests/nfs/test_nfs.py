"""Three nodes train from the head's NFS export while its server restarts and a link is cut."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from payload.machines.inventory import SHARED_FOLDER
from tests.nfs.kernel import boot
from tests.support.data_folders import make_data_folder
from tests.support.launching import TINY_RUN, losses, rank_env, run, torchrun, train_program

pytestmark = [pytest.mark.nfs, pytest.mark.timeout(3600)]
STEPS = 80


def test_a_run_on_nfs_waits_for_its_server_says_so_and_ends_as_without_an_outage(
    tmp_path: Path,
) -> None:
    tokens = make_data_folder(tmp_path / "data", num_train_tokens=32_000_000, vocab_size=512)
    few = TINY_RUN.replace("global_batch_size = 8", "global_batch_size = 6")
    few = few.replace("steps = 20", f"steps = {STEPS}").replace(
        "decay_steps = 20", "decay_steps = 400"
    )
    config = tmp_path / "run.toml"
    config.write_text(few.format(data=f"{SHARED_FOLDER}/data/tokens"), encoding="utf-8")
    console = boot(tmp_path, timeout_s=3000)
    said = (tmp_path / "inside.log").read_text(encoding="utf-8")
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert results.get("exits") == [0, 0, 0], said + console

    # Server and mount are as docs/guides/shared_folder.md describes them.
    assert (results["threads"], results["grace_s"]) == (16, 20)
    for option in ("vers=4.1", "hard", "timeo=100", "retrans=1", "noatime", "nosuid", "nodev"):
        assert option in results["mount"], results["mount"]
    assert results["trial"]["mounted"] and results["trial"]["error"] is None, results["trial"]
    assert results["trial"]["took_s"] is not None

    # huggingface_hub's lock for a download works between nodes.
    assert results["locks"] == [1, 0], results["locks"]

    named = "has not answered for"
    for name in ("restart", "cut"):
        outage = results[name]
        assert named in outage["troubles"][SHARED_FOLDER], outage
        # The run continued by itself, and no trouble is reported.
        assert outage["after"] > outage["during"] and outage["later"] == {}, outage
    assert results["cut"]["trial"]["took_s"] is None, results["cut"]
    assert results["cut"]["killed_after_s"] < 5.0
    assert any("not responding, still trying" in line for line in results["kernel"]), results[
        "kernel"
    ]

    # The same run from a local folder, without an outage.
    config.write_text(few.format(data=tokens), encoding="utf-8")
    whole = tmp_path / "whole"
    done = run(torchrun(3, *train_program(whole, config)), env=rank_env())
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "node-0/run") == losses(whole)
    assert len(losses(whole)) == STEPS
