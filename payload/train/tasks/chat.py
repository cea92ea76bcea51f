"""Trains on the assistant's tokens of conversations, packed into blocks but kept separate."""

from __future__ import annotations

from pathlib import Path

from payload.config.run_config import RunConfig
from payload.data.reading.blocks import Indices
from payload.data.reading.packed_blocks import PackedBlocks, open_packed
from payload.formats.data_folder import DataMeta, load_meta
from payload.run_record.metrics_log import EvalMetrics
from payload.train.losses.base import Counts, Loss
from payload.train.losses.registry import loss_of
from payload.train.models.base import CausalLM
from payload.train.tasks.base import Batch, Samples, Task
from payload.train.tasks.evaluate import EvalPass, evaluate


def open_task(config: RunConfig) -> Task:
    """Open the run's data folder. Raises DataError, ConfigError."""
    folder, length = config.data.folder(), config.data.sequence_length
    train = open_packed(folder, split="train", sequence_length=length)
    val = open_packed(folder, split="val", sequence_length=length)
    meta = load_meta(folder)
    return Chat(folder, meta, train, val, loss_of(config.task, meta))


class PackedSamples(Samples):
    """Training samples that are blocks of packed conversations."""

    def __init__(self, blocks: PackedBlocks, loss: Loss) -> None:
        self._blocks, self.loss = blocks, loss

    def num_samples(self) -> int:
        """Return the number of blocks."""
        return self._blocks.num_blocks()

    def batch(self, chosen: Indices) -> Batch:
        """Return the blocks' tokens, targets and document starts. Raises DataError."""
        inputs = self._blocks.gather(chosen)
        return Batch(inputs=inputs, tokens=inputs[0], weight=self.weight(chosen))

    def prefetch(self, chosen: Indices) -> None:
        """Prefetch these blocks from disk."""
        self._blocks.expect(chosen)

    def counts(self, chosen: Indices) -> Counts:
        """Return the number of blocks and of trained tokens."""
        return Counts(samples=len(chosen), targets=self._blocks.num_targets(chosen))

    def num_tokens(self, chosen: Indices) -> int:
        """Return the number of tokens, without padding."""
        return self._blocks.num_tokens(chosen)


class Chat(Task):
    """A folder of packed conversations in which the trained tokens are marked."""

    def __init__(
        self, folder: Path, meta: DataMeta, train: PackedBlocks, val: PackedBlocks, loss: Loss
    ) -> None:
        self.folder, self.meta, self.loss = folder, meta, loss
        self.train = PackedSamples(train, loss)
        self._blocks = train, val

    def has_range_hashes(self) -> bool:
        """Return whether meta.json has the range hashes that verify each read."""
        return all(blocks.is_checked() for blocks in self._blocks)

    def evaluate(self, model: CausalLM, eval_pass: EvalPass) -> EvalMetrics | None:
        """Return the loss over the marked tokens of the validation data; None after a stop
        request."""
        return evaluate(model, self._blocks[1], eval_pass, self.loss)
