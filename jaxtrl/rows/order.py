"""Which rows make which optimizer step: epochs, micro-batches, accumulation windows and resume positions.

The meaning of every number is Hugging Face Trainer's: an epoch is cut into micro-batches of `per_device * devices`
rows, an optimizer step takes `accumulation` micro-batches, and the last step of an epoch takes what is left. Nothing is
dropped and nothing is repeated: the last micro-batch may be short, and a device may get no row at all.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, TypeVar

import numpy as np
from jaxtyping import Int64

Item = TypeVar("Item")


class DataPosition(NamedTuple):
    """Where a run stands in its data: `offset` rows of epoch `epoch` are used up. An epoch's end is (epoch + 1, 0)."""

    epoch: int = 0
    offset: int = 0


def epoch_order(seed: int, epoch: int, count: int, shuffle: bool = True) -> Int64[np.ndarray, " count"]:
    """The order of `count` rows in an epoch: a permutation that depends on (seed, epoch, count) only.

    It sorts the raw output of NumPy's Philox generator with key (seed, epoch), which NumPy keeps the same in all
    versions (unlike `Generator.permutation`), so no generator state has to be stored to resume.
    """
    if not shuffle:
        return np.arange(count, dtype=np.int64)
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(count), kind="stable").astype(np.int64)


def micro_batches(items: Iterable[Item], per_device: int, devices: int = 1) -> Iterator[list[list[Item]]]:
    """Cuts items, in order, into micro-batches: per device a list of `per_device` items, fewer or none at the end."""
    iterator = iter(items)
    while batch := [list(islice(iterator, per_device)) for _ in range(devices)]:
        if not batch[0]:
            return
        yield batch


@dataclass(frozen=True)
class BatchSizes:
    """How many rows a step takes: `accumulation` micro-batches of `per_device` rows on each of `devices` devices."""

    per_device: int
    devices: int = 1
    accumulation: int = 1

    def __post_init__(self) -> None:
        for name in ("per_device", "devices", "accumulation"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: batch sizes must be at least 1")

    @property
    def rows_per_step(self) -> int:
        """Rows of one full optimizer step."""
        return self.per_device * self.devices * self.accumulation

    def steps_per_epoch(self, count: int) -> int:
        """Optimizer steps in an epoch of `count` rows; the last one may be short."""
        return -(-count // self.rows_per_step)

    def total_steps(self, count: int | None, num_train_epochs: float | int = 3.0, max_steps: int = -1) -> int:
        """Optimizer steps of a run: `max_steps` if positive, else `ceil(num_train_epochs * steps per epoch)`.

        `count` is None for a streamed data set, whose length is unknown; then `max_steps` has to be given. Raises
        ValueError when it is not, or when there are no rows.
        """
        if count == 0:
            raise ValueError("the training data has no rows left: check the file and the counts of dropped rows above")
        if max_steps > 0:
            return max_steps
        if count is None:
            raise ValueError("max_steps is not set: a streamed data set has no known length, so give max_steps")
        if num_train_epochs <= 0:
            raise ValueError(f"num_train_epochs is {num_train_epochs} and max_steps {max_steps}: one must be positive")
        return math.ceil(num_train_epochs * self.steps_per_epoch(count))

    def position(self, step: int, count: int) -> DataPosition:
        """The position after `step` optimizer steps over epochs of `count` rows."""
        epoch, steps = divmod(step, self.steps_per_epoch(count))
        return DataPosition(epoch, steps * self.rows_per_step)

    def steps(
        self, epoch_items: Callable[[int, int], Iterable[Item]], start: DataPosition = DataPosition()
    ) -> Iterator[tuple[list[list[list[Item]]], DataPosition]]:
        """Endless optimizer steps from `start`: (micro-batches, each a list of items per device; the position after).

        `epoch_items(epoch, offset)` gives the items of an epoch from `offset` on: `epoch_order(...)[offset:]`, or a
        stream. Raises ValueError when an epoch has no items, and when `start` lies in no epoch of this data.
        """
        epoch, offset = start
        while True:
            iterator = iter(epoch_items(epoch, offset))
            pending = list(islice(iterator, 1))  # one item ahead tells whether a window ends its epoch
            if not pending:
                raise ValueError(
                    f"epoch {epoch} has no rows after row {offset}: the data is empty or not the data of this run"
                )
            while pending:
                window = pending + list(islice(iterator, self.rows_per_step - 1))
                pending = list(islice(iterator, 1))
                offset += len(window)
                after = DataPosition(epoch, offset) if pending else DataPosition(epoch + 1, 0)
                yield list(micro_batches(window, self.per_device, self.devices)), after
            epoch, offset = epoch + 1, 0
