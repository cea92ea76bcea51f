"""A peer of `benchmarks.gpu`: a plain loop over transformers' model under FSDP2, on one rank.

FSDP2 computes in bf16 and keeps trained weights in fp32. It needs one dtype for all parameters of
a layer, so an adapter is bf16 like its base.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.peers.measured_training import Clock, causal_model, write_report
from benchmarks.peers.work import Work


def main(work: Work) -> None:
    """Train, and write the report."""
    backend = "gloo" if work.device == "cpu" else "nccl"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    model = causal_model(work).to(work.device)
    if work.adapter is not None:
        model.to(torch.bfloat16)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layers = [each for each in model.modules() if type(each).__name__.endswith("DecoderLayer")]
    for module in (*layers, model):
        fully_shard(module, mp_policy=policy)
    clock = Clock(work)
    loss = _train(model, work, clock)
    write_report(work, clock, loss=loss, packages=("transformers", "torch"))
    dist.destroy_process_group()


def _train(model: Any, work: Work, clock: Clock) -> float:
    """Train all steps; return the last loss."""
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    batches = torch.split(torch.from_numpy(work.rows()), work.micro_batch_size)
    loss = torch.zeros(())
    for batch in batches:
        tokens = batch.to(work.device)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        clock.step_done()
    return float(loss)


if __name__ == "__main__":
    main(Work.of(sys.argv[1]))
