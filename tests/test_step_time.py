"""The model of a step's time, compared with manual results, its limits, and real exchanges."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from typing import cast

import pytest
from torch import nn

from payload.config.run_config import RunConfig, parse_run_config
from payload.config.training_sections import AdapterSection
from payload.estimates.compute_time import (
    BACKWARD_SHARE,
    compute_time,
    elements,
    layer_speed,
    step_flops,
)
from payload.estimates.gradient_buckets import buckets
from payload.estimates.network import CopyTimes, Link, Network, ShardTimes, sends_per_byte
from payload.estimates.run_estimate import estimate_run
from payload.estimates.run_time import Speed
from payload.estimates.step_time import StepTime, predict_step, run_step_time, step_time
from payload.machines.core_speed import GPU_MFU
from payload.machines.inventory import Node
from payload.machines.speed_cache import LayerSpeed
from payload.models.gpt2.spec import PRESETS, Gpt2Spec
from payload.optimizers.adamw import GPU_UPDATE_S_PER_WEIGHT, UPDATE_S_PER_WEIGHT
from payload.orchestrate.hardware.nvidia import for_prediction
from payload.train.families.gpt2.model import GPT
from payload.train.strategies.buckets import Bucket, make_buckets

GPT2 = PRESETS["gpt2"]
# One layer of width 2 and no bias: 48 matrix elements, three norms of 2, 10 + 4 embeddings of 2.
SMALL = Gpt2Spec(n_layer=1, n_head=1, n_embd=2, sequence_length=4, vocab_size=10, bias=False)


def of_gpt2(
    *,
    ranks: int = 2,
    gbit_per_s: float = 16.0,
    compute_s: float = 12.0,
    number: int = 4,
    tokens: int | None = None,
    latency_s: float = 0.0,
    busy_s_per_byte: float = 0.0,
    convert_s_per_number: float = 0.0,
) -> StepTime:
    network = Network(
        ranks=ranks,
        bytes_per_s=gbit_per_s / 8 * 1e9,
        latency_s=latency_s,
        busy_s_per_byte=busy_s_per_byte,
        convert_s_per_number=convert_s_per_number,
    )
    return step_time(
        GPT2,
        compute_s=compute_s,
        accumulation=4,
        bytes_per_number=number,
        network=network,
        tokens=tokens,
    )


def test_a_ring_sends_each_byte_twice_but_for_a_rank_s_own_share() -> None:
    assert [sends_per_byte(ranks) for ranks in (1, 2, 4)] == [0.0, 1.0, 1.5]
    network = Network(ranks=4, bytes_per_s=1e9, latency_s=1e-3)
    assert network.all_reduce_s(2e9) == pytest.approx(6 * 1e-3 + 3.0)


def test_one_rank_exchanges_nothing() -> None:
    alone = of_gpt2(ranks=1, latency_s=1.0, busy_s_per_byte=1.0)
    assert alone == StepTime(compute_s=12.0, exchange_s=0.0, exposed_s=0.0, busy_s=0.0)
    assert (alone.total_s(), alone.efficiency()) == (12.0, 1.0)


def test_what_one_bucket_alone_costs_is_all_exposed() -> None:
    # 82 elements make one bucket, which is full at the end of the backward pass.
    (bucket,) = buckets(SMALL)
    assert (bucket.elements, bucket.ready) == (SMALL.num_params(), 1.0) == (82, 1.0)
    network = Network(ranks=2, bytes_per_s=82.0, latency_s=0.25)
    step = step_time(SMALL, compute_s=6.0, accumulation=2, bytes_per_number=4, network=network)
    # Two rounds of a quarter second, and 328 bytes at 82 a second.
    assert step.exchange_s == step.exposed_s == pytest.approx(0.5 + 4.0)
    assert step.total_s() == pytest.approx(10.5)
    assert step.efficiency() == pytest.approx(6.0 / 10.5)


def test_a_fast_network_leaves_the_last_bucket_exposed_and_hides_the_others() -> None:
    last = buckets(GPT2)[-1].elements * 4
    step = of_gpt2(busy_s_per_byte=1e-9)
    assert step.exposed_s == pytest.approx(last / 2e9)
    assert step.exchange_s == pytest.approx(GPT2.num_params() * 4 / 2e9)
    # Only the hidden part of the exchange slows computing down.
    assert step.busy_s == pytest.approx((GPT2.num_params() * 4 - last) * 1e-9)


def test_with_the_kernels_only_rows_of_tokens_are_exposed_on_a_fast_network() -> None:
    *_, layers, rows = buckets(GPT2, tokens=2048)
    assert rows.elements * 4 < 3e6
    step = of_gpt2(tokens=2048)
    assert step.exposed_s == pytest.approx((layers.elements + rows.elements) * 4 / 2e9)
    assert step.exposed_s < of_gpt2().exposed_s / 5


def test_rows_of_tokens_are_never_more_than_the_vocabulary() -> None:
    assert buckets(GPT2, tokens=10**9)[-1].elements == GPT2.vocab_size * GPT2.n_embd


def test_a_slow_network_exposes_all_but_what_fits_behind_the_backward_pass() -> None:
    first = buckets(GPT2)[0]
    step = of_gpt2(gbit_per_s=0.1)
    backward_s = 12.0 / 4 * BACKWARD_SHARE
    hidden_s = backward_s * (1 - first.ready)
    assert step.exposed_s == pytest.approx(step.exchange_s - hidden_s)


def test_bf16_halves_what_travels_and_costs_its_conversion() -> None:
    whole, half = of_gpt2(), of_gpt2(number=2, convert_s_per_number=1e-9)
    assert half.exchange_s == pytest.approx(whole.exchange_s / 2)
    assert half.busy_s == pytest.approx(GPT2.num_params() * 1e-9)


def test_more_bandwidth_fewer_ranks_and_less_latency_are_never_slower() -> None:
    by_rate = [of_gpt2(gbit_per_s=rate).total_s() for rate in (0.1, 0.3, 1, 3, 10, 30, 100)]
    assert by_rate == sorted(by_rate, reverse=True)
    by_ranks = [of_gpt2(ranks=ranks, latency_s=1e-4).total_s() for ranks in (1, 2, 3, 16, 64)]
    assert by_ranks == sorted(by_ranks)
    by_latency = [of_gpt2(latency_s=latency).total_s() for latency in (0, 1e-4, 1e-3)]
    assert by_latency == sorted(by_latency)
    # With unlimited bandwidth and no computing cost, the exchange is free.
    assert of_gpt2(gbit_per_s=1e9).total_s() == pytest.approx(12.0)


def test_a_run_s_passes_are_those_of_its_batch_on_these_ranks() -> None:
    config = parse_run_config(
        "[batch]\nglobal_batch_size = 32\nmicro_batch_size = 4\n"
        "[distributed]\ngrad_dtype = 'bf16'\n",
        where="test",
    )
    network = Network(ranks=2, bytes_per_s=1.25e8)
    found = run_step_time(config, GPT2, compute_s=12.0, network=network)
    assert replace(found, update_s=0.0) == of_gpt2(gbit_per_s=1.0, number=2, tokens=8 * 1024)
    assert found.update_s == pytest.approx(UPDATE_S_PER_WEIGHT * GPT2.num_params())
    assert found.total_s() == pytest.approx(replace(found, update_s=0.0).total_s() + found.update_s)


def test_a_ranks_cores_share_the_update_until_memory_is_the_limit() -> None:
    config = parse_run_config("", overrides=["distributed.strategy=shard"], where="test")
    network = Network(ranks=4, bytes_per_s=1e9)
    alone, few, many, most = (
        run_step_time(config, GPT2, compute_s=12.0, network=network, threads=threads)
        for threads in (1, 4, 16, 60)
    )
    assert alone.update_s == pytest.approx(UPDATE_S_PER_WEIGHT * GPT2.num_params() / 4)
    assert few.update_s == pytest.approx(alone.update_s / 4)
    assert few.copies_s == pytest.approx(alone.copies_s / 4) and alone.copies_s > 0
    saved_s = (alone.update_s + alone.copies_s) * 3 / 4
    assert few.total_s() == pytest.approx(alone.total_s() - saved_s)
    assert many.update_s == most.update_s == pytest.approx(alone.update_s / 16)


def test_sharded_ranks_copy_what_they_gather_and_what_they_sum() -> None:
    copies = CopyTimes(gathered_s_per_byte=1e-9, summed_s_per_byte=5e-9)
    dear_times = ShardTimes(gather_bytes_per_s=5e8, sum_bytes_per_s=2e9, copies=copies)
    none = CopyTimes(gathered_s_per_byte=0.0, summed_s_per_byte=0.0)
    network = Network(ranks=2, bytes_per_s=1e9, shards=dear_times)
    free = replace(network, shards=replace(dear_times, copies=none))
    weights, embeddings = GPT2.num_params() * 4, GPT2.embedding_size() * 4
    passes = ["batch.micro_batch_size=1", "batch.global_batch_size=6"]
    found, travelled = {}, {}
    for strategy in ("replicate", "shard", "zero3"):
        words = [*passes, f"distributed.strategy={strategy}"]
        config = parse_run_config("", overrides=words, where="test")
        dear, cheap = (
            run_step_time(config, GPT2, compute_s=12.0, network=each) for each in (network, free)
        )
        assert replace(dear, copies_s=0.0) == cheap
        assert dear.total_s() == pytest.approx(cheap.total_s() + dear.copies_s)
        found[strategy] = dear.copies_s
        travelled[strategy] = dear.exchange_s
    # Three micro-batches; each gathers layers twice and embeddings once, and sums all gradients.
    assert found["replicate"] == 0.0
    gathered = 2 * weights - embeddings
    assert found["shard"] == pytest.approx(3 * (gathered + 5 * weights) * 1e-9)
    assert found["zero3"] == pytest.approx(3 * (2 * weights + 5 * weights) * 1e-9)
    # A rank sends half of the gathered bytes, and half of the gradients; DeepSpeed sends all of
    # them.
    assert travelled["shard"] == pytest.approx(3 / 2 * (gathered / 5e8 + weights / 2e9))
    assert travelled["zero3"] == pytest.approx(3 / 2 * (2 * weights / 5e8 + 2 * weights / 2e9))


@pytest.mark.parametrize("preset", ["tiny", "gpt2"])
def test_buckets_hold_every_number_once_and_fill_in_order(preset: str) -> None:
    for bias, tokens in product((True, False), (None, 1024)):
        shape = replace(PRESETS[preset], bias=bias)
        found = buckets(shape, tokens=tokens)
        whole = found if tokens is None else found[:-1]
        assert sum(bucket.elements for bucket in whole) == shape.num_params()
        shares = [bucket.ready for bucket in found]
        assert shares == sorted(shares) and shares[-1] == 1.0


def test_buckets_are_those_of_the_exchange() -> None:
    """At a width where each layer fills one bucket."""
    shape = Gpt2Spec(n_layer=3, n_head=2, n_embd=768, sequence_length=8, vocab_size=64)
    model = GPT(shape, random=False)
    assert _sizes(make_buckets(model.parameters())) == [each.elements for each in buckets(shape)]
    split = make_buckets(model.parameters(), first=cast(nn.Parameter, model.wte.weight))
    assert _sizes(split) == [each.elements for each in buckets(shape, tokens=64)[:-1]]


def _sizes(made: list[Bucket]) -> list[int]:
    return [bucket.flat.numel() for bucket in made]


@pytest.mark.parametrize("strategy", ["replicate", "shard"])
def test_a_plan_for_gpu_nodes_predicts_for_gpus_though_the_device_is_auto(strategy: str) -> None:
    words = [f"distributed.strategy={strategy}"]
    cpu = Node(name="a", address="10.0.0.2", physical_cores=4, memory_gib=16.0)
    gpu = replace(cpu, gpus=2)
    auto = parse_run_config("", overrides=words, where="test")
    named = parse_run_config("", overrides=[*words, "device.kind=cuda"], where="test")
    network = Network(ranks=4, bytes_per_s=1e9)
    predicted = for_prediction(auto, [gpu, gpu])
    assert predicted == named and predicted.device.kind == "cuda"
    assert for_prediction(auto, [gpu, cpu]) == for_prediction(auto, [cpu]) == auto
    on_gpus, on_cores = (
        run_step_time(each, GPT2, compute_s=12.0, network=network) for each in (predicted, auto)
    )
    shards = 4 if strategy == "shard" else 1
    assert on_gpus.copies_s == 0.0 and (on_cores.copies_s > 0.0) == (strategy == "shard")
    assert on_gpus.update_s == pytest.approx(GPU_UPDATE_S_PER_WEIGHT * GPT2.num_params() / shards)
    # The project's kernels, which reach more of the peak, need a CPU.
    assert predicted.typical_mfu(GPT2) == GPU_MFU < auto.typical_mfu(GPT2)


def test_computing_takes_the_flops_at_the_expected_share_of_the_peak() -> None:
    config = parse_run_config("", overrides=["precision.dtype=bf16"], where="test")
    found = compute_time(config, GPT2, peak_flops_per_s=4e11, cores=2)
    assert found.mfu == config.typical_mfu(GPT2, core_flops_per_s=2e11)
    flops = config.tokens_per_step() * GPT2.flops_per_token()
    assert found.seconds == flops / (4e11 * found.mfu)
    step = predict_step(
        config,
        GPT2,
        peak_flops_per_s=4e11,
        network=Network(ranks=1, bytes_per_s=1.0),
        threads=2,
    )
    assert step.compute == found and step.parts.compute_s == found.seconds
    # Recomputed layers take time, but do not count as FLOPs of the model.
    twice = replace(config, memory=replace(config.memory, activation_checkpointing="on"))
    again = compute_time(twice, GPT2, peak_flops_per_s=4e11, cores=2)
    assert again.seconds == pytest.approx(found.seconds * 4 / 3) and again.mfu == found.mfu


def test_measured_layers_replace_the_typical_share_of_the_peak() -> None:
    settings = ["precision.dtype=bf16", "batch.global_batch_size=8", "batch.micro_batch_size=2"]
    config = parse_run_config("", overrides=settings, where="test")
    layers = LayerSpeed(threads=2, element_s=2e-9, weight_s=1e-9, layer_s=1e-3)

    def seconds(config: RunConfig) -> float:
        found = compute_time(config, GPT2, peak_flops_per_s=4e11, cores=4, layers=layers)
        assert found.mfu == pytest.approx(step_flops(config, GPT2) / 4e11 / found.seconds)
        return found.seconds

    # Each of two ranks has two micro-batches of two sequences.
    tokens, flops = 4 * config.data.sequence_length, step_flops(config, GPT2)
    assert elements(GPT2) == 16 * 768 * 12 + 50257
    between_s, weights_s = tokens * elements(GPT2) * 2e-9, 2 * GPT2.num_params() * 1e-9
    between_s += 2 * 12 * 1e-3
    assert seconds(config) == pytest.approx(flops / 4e11 + between_s + weights_s)
    # Recomputed layers convert no weights again.
    on = replace(config, memory=replace(config.memory, activation_checkpointing="on"))
    found = compute_time(on, GPT2, peak_flops_per_s=4e11, cores=4, layers=layers)
    assert found.seconds == pytest.approx(4 / 3 * (flops / 4e11 + between_s) + weights_s)
    # Only the adapter's weights have a gradient, and it doubles the elements of the layers.
    adapted = replace(config, adapter=AdapterSection(kind="lora")).adapted(GPT2)
    assert elements(adapted) == 2 * 16 * 768 * 12 + 50257
    lora = replace(config, adapter=AdapterSection(kind="lora"))
    slow = replace(layers, layer_s=2e-3)
    few, many = (
        compute_time(lora, adapted, peak_flops_per_s=4e11, cores=4, layers=each).seconds
        for each in (layers, slow)
    )
    assert many - few == pytest.approx(2 * 2 * 12 * 1e-3)
    # Without the kernels that were measured, the share is typical again.
    off = replace(config, engine=replace(config.engine, kernels="off"))
    plain = compute_time(off, GPT2, peak_flops_per_s=4e11, cores=4)
    assert compute_time(off, GPT2, peak_flops_per_s=4e11, cores=4, layers=layers) == plain


def test_two_micro_batches_give_the_time_of_elements_and_weights() -> None:
    spec, flops_per_s = replace(GPT2, n_layer=2, vocab_size=256), 3e11
    expected = LayerSpeed(threads=2, element_s=2e-9, weight_s=1e-9, layer_s=1e-3)

    def took_s(tokens: int) -> float:
        flops = tokens * spec.with_sequence_length(tokens).flops_per_token()
        between_s = tokens * elements(spec) * expected.element_s + 2 * expected.layer_s
        return flops / flops_per_s + between_s + spec.num_params() * expected.weight_s

    times_s = {tokens: took_s(tokens) for tokens in (512, 64)}
    measured = partial(layer_speed, spec, times_s, layer_s=expected.layer_s, threads=2)
    found = measured(flops_per_s=flops_per_s)
    assert found.threads == 2 and found.layer_s == expected.layer_s
    assert found.element_s == pytest.approx(expected.element_s)
    assert found.weight_s == pytest.approx(expected.weight_s)
    # A disturbed measurement of the peak does not make the layers faster than their matmuls.
    nothing = measured(flops_per_s=1e10)
    assert nothing.element_s == 0.0 <= nothing.weight_s


def test_an_evaluation_takes_a_third_of_the_training_on_as_many_tokens() -> None:
    config = parse_run_config("", overrides=["precision.dtype=bf16"], where="test")
    numbers = estimate_run(config, spec=GPT2, world_size=1, link=Link(bytes_per_s=1.0))
    speed = Speed.of_steps(numbers, step_s=2.0)
    assert speed == Speed.of_tokens(numbers, tokens_per_s=speed.tokens_per_s())
    train = replace(config.train, steps=10, eval_every=6, eval_tokens=0, checkpoint_every=4)
    tokens = numbers.tokens_per_step
    found = speed.run_time(train, val_tokens=tokens, checkpoint_bytes=10**9)
    # Evaluations before the first step, after the sixth and after the last one.
    assert (found.training_s, found.evaluation_s) == pytest.approx((20.0, 2.0))
    assert (
        found.saving_s
        == 3
        * speed.run_time(
            replace(train, checkpoint_every=0), val_tokens=0, checkpoint_bytes=10**9
        ).saving_s
    )
    whole = found.total_s()
    sampled = speed.run_time(train, val_tokens=tokens, checkpoint_bytes=10**9, sampled_params=10**8)
    assert whole > found.training_s + found.evaluation_s + found.saving_s
    assert sampled.total_s() == whole + sampled.samples_s > whole
    assert found.words().startswith("20 s training, ") and "samples" not in found.words()
    assert "samples" in sampled.words()
