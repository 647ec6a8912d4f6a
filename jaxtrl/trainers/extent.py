"""How long a run is, and how far it has come: steps and epochs as Transformers counts them."""

from dataclasses import dataclass

from jaxtrl.rows.order import BatchSizes, DataPosition


@dataclass(frozen=True)
class Extent:
    """`steps` optimizer steps over `count` lines an epoch (None: a stream, whose whole run is one epoch)."""

    sizes: BatchSizes
    count: int | None
    steps: int

    @property
    def epochs(self) -> int:
        """Epochs that the run enters."""
        return 1 if self.count is None else -(-self.steps // self.sizes.steps_per_epoch(self.count))

    def epoch_at(self, position: DataPosition) -> float:
        """Epochs done: whole ones and the share of micro-batches of the one at hand."""
        lines = self.sizes.per_device * self.sizes.devices
        each = self.steps * self.sizes.accumulation if self.count is None else -(-self.count // lines)
        return position.epoch + -(-position.offset // lines) / each
