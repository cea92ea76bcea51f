"""A trial's measurements: predictions, slow nodes, slow links, and their record."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from payload.config.run_config import parse_run_config
from payload.config.training_sections import DtypeChoice
from payload.core.dtype import Dtype
from payload.core.validation.records import build
from payload.machines.core_speed import typical_mfu
from payload.machines.inventory import Access, ClusterInventory
from payload.models.gpt2.spec import PRESETS
from payload.optimizers.adamw import UPDATE_S_PER_WEIGHT
from payload.orchestrate.findings.trial import (
    Measured,
    NodeSpeed,
    Record,
    Result,
    known_trial,
    nodes_sha,
    record_path,
)
from payload.orchestrate.machine_profiles.offline_plan import dry_run_access
from payload.orchestrate.preflight.report import (
    FRESH_S,
    Report,
    exchange_findings,
    is_fresh,
    predict,
    slow_links,
    speed_findings,
    summary,
    try_if_new,
    with_known_trial,
    with_trial,
)
from payload.orchestrate.ssh.cluster import Cluster
from payload.orchestrate.ssh.node_code import this_code
from payload.orchestrate.ssh.remote_calls import Login
from tests.orchestrate.test_findings import make_facts, make_node

CONFIG = parse_run_config("", where="test")
GPT2 = PRESETS["gpt2"]


def make_measured(
    *bf16_tflops: float,
    received: list[float] | None = None,
    all_reduce: float = 1e9,
    fp32_tflops: float = 1.0,
) -> Measured:
    speeds = bf16_tflops or (4.0, 4.0, 4.0)
    nodes = {
        f"node-{i}": NodeSpeed(
            bf16_flops_per_s=speed * 1e12,
            fp32_flops_per_s=fp32_tflops * 1e12,
            received_bytes_per_s=received[i] if received else 2e9,
        )
        for i, speed in enumerate(speeds)
    }
    return Measured(
        world_size=len(nodes), nodes=nodes, all_reduce_bytes_per_s=all_reduce, latency_s=2e-4
    )


def of_speed(measured: Measured, **kinds: Any) -> dict[str, str]:
    nodes = [make_node(i, machine_type=kinds.get(f"node_{i}")) for i in range(len(measured.nodes))]
    return {finding.node: finding.cause for finding in speed_findings(nodes, measured)}


def test_equal_nodes_on_a_fast_network_have_no_finding() -> None:
    measured = make_measured(4.0, 4.1, 3.9)
    nodes = [make_node(i) for i in range(3)]
    assert of_speed(measured) == {}
    assert list(exchange_findings(nodes, measured, predict(CONFIG, GPT2, measured))) == []


def test_a_slow_node_among_its_like_is_named_and_one_of_another_kind_is_not() -> None:
    assert of_speed(make_measured(4.0, 3.0, 4.0)) == {
        "node-1": "it is slow among 3 nodes of its kind: 3.00 TFLOP/s, but the median is 4.00"
    }
    assert of_speed(make_measured(4.0, 3.3, 4.0)) == {}
    kinds = {"node_0": "c3", "node_1": "c3-small", "node_2": "c3"}
    assert of_speed(make_measured(4.0, 1.5, 4.0), **kinds) == {}
    assert list(of_speed(make_measured(4.0, 2.0))) == ["node-1"]


def test_a_node_where_bf16_gains_nothing_is_named() -> None:
    found = of_speed(make_measured(4.0, 4.0, 0.9, fp32_tflops=3.9))
    assert "bf16 matmuls run at 0.23x the speed of fp32 on this node" in found["node-2"]
    assert "bf16 matmuls run at 1.03x" in found["node-0"]


def test_a_node_whose_cpu_has_no_bf16_is_not_named_a_second_time() -> None:
    measured = make_measured(0.004, 0.004, fp32_tflops=0.16)
    nodes = [make_node(i) for i in range(2)]
    (found,) = speed_findings(nodes, measured, without_bf16=["node-0"])
    assert found.node == "node-1" and "(0.004 and 0.16 TFLOP/s)" in found.cause


def test_a_prediction_is_the_plan_s_own_arithmetic() -> None:
    # 16 Gbit/s each way: 4/3 of 498 MB of gradients and of 8 MB, the rows of tokens read.
    measured = make_measured(all_reduce=2e9 * 3 / 4)
    prediction = predict(CONFIG, GPT2, measured)
    assert prediction.sync_s == pytest.approx(0.337, abs=1e-3)
    # The last bucket, 22 MB, and the rows are not hidden.
    update_s = UPDATE_S_PER_WEIGHT * GPT2.num_params()
    step_s = prediction.step_s - update_s
    assert step_s - prediction.compute_s == pytest.approx(0.020, abs=1e-3)
    # Four slower cores reach more of the same peak.
    of_four = predict(CONFIG, GPT2, measured, threads=4)
    assert of_four.compute_s < prediction.compute_s
    waits_s = step_s - prediction.compute_s
    assert of_four.step_s - of_four.compute_s == pytest.approx(waits_s + update_s / 4)
    flops = 32 * 1024 * GPT2.flops_per_token()
    mfu = partial(typical_mfu, core_flops_per_s=12e12 / measured.world_size, width=768)
    assert prediction.compute_s == pytest.approx(flops / (12e12 * mfu(kernels=True)))
    half = parse_run_config("[distributed]\ngrad_dtype = 'bf16'", where="test")
    assert predict(half, GPT2, measured).sync_s == pytest.approx(0.169, abs=1e-3)
    share = mfu(kernels=False, core_flops_per_s=3e12 / measured.world_size)
    fp32 = parse_run_config("[precision]\ndtype = 'fp32'", where="test")
    assert predict(fp32, GPT2, measured).compute_s == pytest.approx(flops / (3e12 * share))
    reference = parse_run_config("[engine]\nkernels = 'off'", where="test")
    assert predict(reference, GPT2, measured).compute_s == pytest.approx(
        flops / (12e12 * mfu(kernels=False))
    )
    text = summary(measured, prediction)
    assert text.startswith("all-reduce over 3 ranks: 16 Gbit/s each way, 0.2 ms; predicted for ")


def test_a_run_of_4_bits_is_predicted_at_the_peak_of_the_faster_dtype() -> None:
    measured = make_measured(0.1, 0.1, 0.1)
    words = ("model.init=x", "adapter.kind=lora", "model.quantize=nf4")
    kept, again = (
        parse_run_config(
            "", overrides=[*words, f"memory.activation_checkpointing={each}"], where="test"
        )
        for each in ("off", "on")
    )
    assert measured.dtype("auto") == "fp32"
    spec = kept.adapted(GPT2)
    flops = kept.tokens_per_step() * spec.flops_per_token()
    share = typical_mfu(kernels=False, core_flops_per_s=1e12, width=768)
    compute_s = predict(kept, spec, measured).compute_s
    assert compute_s == pytest.approx(flops / (3e12 * share))
    assert predict(again, spec, measured).compute_s == pytest.approx(compute_s * 4 / 3)


def test_a_slow_network_is_a_warning_with_the_time_per_step() -> None:
    measured = make_measured(all_reduce=9e4, received=[1.2e5, 1.1e5, 1.2e5])
    nodes = [make_node(i) for i in range(3)]
    (finding,) = exchange_findings(nodes, measured, predict(CONFIG, GPT2, measured))
    assert finding.severity == "warning" and finding.node == "node-0"
    assert finding.cause == (
        "the network between node-0, node-1, node-2 is slow, 0.96 Mbit/s: predicted 5,620 s of "
        "synchronisation a step beside 11.7 s of computing (124M parameters, 32 sequences of 1024 "
        "tokens a step)"
    )


@pytest.mark.parametrize(
    ("received", "slow"),
    [
        ([1e5, 1e9, 1e5], ["node-2"]),
        ([1e5, 1e5, 1e9], ["node-0"]),
        ([1e5, 1e5, 1e5], []),
        ([1e9, 1e5, 1e9], []),
        ([1e9, 1e5, 1e5, 1e9, 1e9], ["node-1"]),
        ([1e5, 1e5], []),
    ],
)
def test_a_node_that_receives_and_sends_slowly_has_the_slow_link(
    received: list[float], slow: list[str]
) -> None:
    measured = make_measured(*(4.0 for _ in received), received=received)
    assert slow_links(list(measured.nodes), measured) == slow


def result_of(ranks: list[dict[str, Any]], exchange: dict[str, Any] | None) -> Result:
    return build(Result, {"ranks": ranks, "exchange": exchange}, where="test")


def test_figures_of_ranks_become_those_of_their_nodes() -> None:
    ranks = [{"node": f"node-{i // 2}", "bf16": 2e12, "fp32": 1e12} for i in range(4)]
    received = [1.0, 2.0, 3.0, 4.0]
    exchange = {"all_reduce_bytes_per_s": 1e9, "latency_s": 1e-3, "received_bytes_per_s": received}
    measured = Measured.from_result(result_of(ranks, exchange))
    assert measured.nodes["node-1"] == NodeSpeed(
        bf16_flops_per_s=4e12, fp32_flops_per_s=2e12, received_bytes_per_s=3.0
    )
    alone = Measured.from_result(result_of(ranks[:1], None))
    prediction = predict(CONFIG, GPT2, alone)
    assert alone.link() is None and prediction.sync_s == 0.0
    assert summary(alone, prediction).startswith("measured with one rank, so without an exchange; ")


def make_cluster() -> ClusterInventory:
    return ClusterInventory(
        cluster="mine",
        source="file",
        ssh_user="trainer",
        access=Access(kind="direct"),
        bucket=None,
        nodes=tuple(make_node(i, host_keys=(f"ssh-ed25519 A{i}",)) for i in range(3)),
    )


def test_a_trial_is_known_for_the_same_nodes_alone_and_fresh_for_a_day(tmp_path: Path) -> None:
    inventory = make_cluster()
    path = record_path(tmp_path, cluster="mine")
    assert known_trial(inventory.cluster, inventory.nodes, tmp_path) is None
    record = Record(
        nodes_sha=nodes_sha(inventory.nodes),
        code=this_code().digest,
        time_unix=1000.0,
        interfaces={"node-0": "ens4"},
        measured=make_measured(),
    )
    record.write(path)
    assert known_trial(inventory.cluster, inventory.nodes, tmp_path) == record
    # Measurements of cores do not apply to GPUs.
    assert known_trial(inventory.cluster, inventory.nodes, tmp_path, on_gpus=True) is None
    head, *others = inventory.nodes
    renewed = replace(inventory, nodes=(replace(head, host_keys=("ssh-ed25519 B",)), *others))
    assert known_trial(renewed.cluster, renewed.nodes, tmp_path) is None
    assert is_fresh(record, now_unix=1000.0 + FRESH_S - 1)
    assert not is_fresh(record, now_unix=1000.0 + FRESH_S)
    assert not is_fresh(record, now_unix=0.0)
    assert not is_fresh(replace(record, code="other"), now_unix=1001.0)
    for damage in ("", "[]", "{}", '{"schema_version": 2}', path.read_text("utf-8")[:-40]):
        path.write_text(damage, encoding="utf-8")
        assert known_trial(inventory.cluster, inventory.nodes, tmp_path) is None


def test_run_uses_a_fresh_trial_s_measurements_without_a_new_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    inventory = make_cluster()
    report = Report(cluster="mine", checks={}, facts={}, findings=[], took_s=0.0)
    unasked = Cluster(inventory, login=Login(user="nobody", key=tmp_path / "none"), env={})
    record = Record(
        nodes_sha=nodes_sha(inventory.nodes),
        code=this_code().digest,
        time_unix=time.time(),
        interfaces={},
        measured=make_measured(),
    )
    record.write(record_path(tmp_path, cluster="mine"))
    assert try_if_new(report, inventory.nodes, unasked, CONFIG).measured == record.measured
    stale = replace(record, time_unix=time.time() - 2 * FRESH_S)
    stale.write(record_path(tmp_path, cluster="mine"))
    # `run --quick` takes what `plan` takes.
    assert with_known_trial(report, inventory.nodes, CONFIG).measured == record.measured
    tried = try_if_new(report, inventory.nodes, unasked, CONFIG)
    assert tried.measured is None and [f.node for f in tried.findings] == [
        node.name for node in inventory.nodes
    ]


AMX, AVX512, NEITHER = ("amx_bf16", "amx_tile"), ("avx512_bf16",), ()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([AMX, AVX512], True),
        ([AMX, NEITHER], False),
        ([None, NEITHER], False),
        ([AMX, None], None),
        ([], None),
    ],
)
def test_nodes_have_bf16_if_every_cpu_does(
    flags: list[tuple[str, ...] | None], expected: bool | None
) -> None:
    facts = {f"node-{i}": make_facts(i, cpu_flags=each) for i, each in enumerate(flags)}
    report = Report(cluster="mine", checks={}, facts=facts, findings=[], took_s=0.0)
    assert report.have_bf16() is expected


@pytest.mark.parametrize(
    ("choice", "measured", "has_bf16", "expected"),
    [
        ("auto", None, None, "bf16"),
        ("auto", None, True, "bf16"),
        ("auto", None, False, "fp32"),
        ("bf16", None, False, "bf16"),
        ("fp32", None, True, "fp32"),
        ("auto", make_measured(4.0), False, "bf16"),
        ("auto", make_measured(0.1), True, "fp32"),
        ("auto", make_measured(1.05), True, "fp32"),
        ("bf16", make_measured(0.1), False, "bf16"),
    ],
)
def test_a_cluster_s_dtype_is_the_set_one_else_by_speeds_else_by_its_cpus(
    choice: DtypeChoice, measured: Measured | None, has_bf16: bool | None, expected: Dtype
) -> None:
    dry = dry_run_access(make_cluster(), None, run_id="one")
    assert replace(dry, measured=measured, has_bf16=has_bf16).dtype(choice) == expected


def test_a_trial_is_left_out_where_it_could_only_wait_for_a_resolver() -> None:
    facts = {f"node-{i}": make_facts(i, resolver_answers=i != 1) for i in range(3)}
    report = Report(cluster="mine", checks={}, facts=facts, findings=[], took_s=0.0)
    tried = with_trial(report, make_cluster().nodes, CONFIG, lambda: pytest.fail("it was made"))
    assert tried.notes == ["mpirun was not tried, because the resolver of node-1 does not answer"]
