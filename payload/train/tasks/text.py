"""Next-token prediction on non-overlapping blocks of text."""

from __future__ import annotations

from payload.config.run_config import RunConfig
from payload.data.reading.blocks import Indices, TokenBlocks, TokenData
from payload.run_record.metrics_log import EvalMetrics
from payload.train.losses.base import Counts, Loss
from payload.train.losses.registry import loss_of
from payload.train.models.base import CausalLM
from payload.train.tasks.base import Batch, Samples, Task
from payload.train.tasks.evaluate import EvalPass, evaluate


def open_task(config: RunConfig) -> Task:
    """Open the run's data folder. Raises DataError."""
    data = TokenData.open(config.data.folder(), sequence_length=config.data.sequence_length)
    return Text(data, loss_of(config.task, data.meta))


class BlockSamples(Samples):
    """Training samples that are full blocks of a token file; every token is a target."""

    def __init__(self, blocks: TokenBlocks, loss: Loss) -> None:
        self._blocks, self.loss = blocks, loss

    def num_samples(self) -> int:
        """Return the number of full blocks."""
        return self._blocks.num_full_blocks()

    def batch(self, chosen: Indices) -> Batch:
        """Return the blocks' inputs and targets. Raises DataError."""
        tokens, targets = self._blocks.gather(chosen)
        return Batch(inputs=(tokens, targets), tokens=tokens, weight=self.weight(chosen))

    def prefetch(self, chosen: Indices) -> None:
        """Prefetch these blocks from disk."""
        self._blocks.expect(chosen)

    def counts(self, chosen: Indices) -> Counts:
        """Return the number of blocks and of their tokens."""
        return Counts(samples=len(chosen), targets=self.num_tokens(chosen))

    def num_tokens(self, chosen: Indices) -> int:
        """Return the number of tokens."""
        return len(chosen) * self._blocks.sequence_length


class Text(Task):
    """A data folder of plain text: train.bin and val.bin, without labels."""

    def __init__(self, data: TokenData, loss: Loss) -> None:
        self.folder, self.meta, self.loss = data.folder, data.meta, loss
        self.train = BlockSamples(data.train, loss)
        self._data = data

    def has_range_hashes(self) -> bool:
        """Return whether meta.json has the range hashes that verify each read."""
        return self._data.has_range_hashes()

    def evaluate(self, model: CausalLM, eval_pass: EvalPass) -> EvalMetrics | None:
        """Return the loss of the validation tokens; None after a request to stop."""
        return evaluate(model, self._data.val, eval_pass, self.loss)
