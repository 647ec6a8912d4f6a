"""The lines of a data set that is trained as tree rows: each line is one row, planned over the whole data set."""

import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from datasets import Dataset

from jaxtrl.rows.batch import Row, Sample
from jaxtrl.rows.blocks import DEFAULT_BLOCK_SIZE
from jaxtrl.rows.needs import Needs
from jaxtrl.rows.tree import plan_trees, tree_row
from jaxtrl.trainers.data import Line, Lines, Packing, padding_document, read_samples


class TreeNeeds(NamedTuple):
    """What tree lines need. A line in a row begins at the edge of a block and is filled up to one, by padding that
    nothing else sees, so that what several lines need together is the sum."""

    lines: Needs
    block_size: int

    @property
    def line_count(self) -> int:
        return len(self.lines.tokens)

    def needs(self, rows: Sequence[Sequence[int]], block_size: int = DEFAULT_BLOCK_SIZE) -> Needs:
        """What rows of these lines need."""
        line = np.array([line for row in rows for line in row], np.int64)
        row = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
        return Needs(*(np.bincount(row, field[line], len(rows)).astype(np.int64) for field in self.lines))

    def filled(self, length: int) -> "TreeNeeds":
        """Each line filled up to the edge of a block, and to `length` (a multiple of the block size) tokens."""
        tokens = self.lines.tokens
        ends = np.maximum(-(-tokens // self.block_size) * self.block_size, length)
        more = (ends - 1) // self.block_size - tokens // self.block_size  # blocks that the padding reaches over
        more = np.where(ends > tokens, more, 0)
        return self._replace(
            lines=self.lines._replace(
                tokens=ends,
                lanes=self.lines.lanes + more * (more + 1) // 2,
                starts=self.lines.starts + (ends > tokens),
            )
        )


class TreeLines(Lines):
    """Tree rows of at most `packing.length` distinct tokens, from a tokenised data set whose samples are not longer.

    The ids of the whole data set are in memory while they are planned (about 12 bytes a token), then only which samples
    make which row. Under `packing.length` a line is padded to the next edge of a block.
    """

    def __init__(self, dataset: Dataset, packing: Packing):
        block_size = packing.block_size
        self.dataset = dataset.with_format("arrow")
        samples = [sample._replace(group=i) for i, sample in enumerate(self._read_all())]
        plan = plan_trees(samples, packing.length, block_size=block_size)
        self.packing = packing._replace(length=-(-packing.length // block_size) * block_size)
        self.block_size = block_size
        self._rows, self._share = plan.rows, plan.share
        self.count = len(plan.rows)
        self._trees = TreeNeeds(plan.needs, block_size)
        self.documents = self._trees
        self.raw_tokens, self.unique_tokens, self.ratio = plan.raw_tokens, plan.unique_tokens, plan.ratio
        placed = np.concatenate([np.zeros(0, np.int64), *map(np.array, plan.rows)])
        lengths = np.array([len(sample.input_ids) for sample in samples])
        trained = np.array([np.count_nonzero(sample.loss_mask[1:]) for sample in samples])
        self.fingerprint = zlib.crc32(np.concatenate([lengths, trained, placed, plan.share]).tobytes())

    def filled(self, length: int) -> TreeNeeds:
        return self._trees.filled(length)

    def describe(self) -> str:
        """What is packed into what, for the log."""
        return (
            f", packed into {self.count:,} tree rows: {self.unique_tokens:,} tokens are computed for "
            f"{self.raw_tokens:,} (packing ratio {self.ratio:.2f})"
        )

    def load(self, numbers: Sequence[int]) -> list[Line]:
        """The samples of these lines; samples of a line that share their prefix have one `group`."""
        rows = [self._rows[number] for number in numbers]
        members = [index for row in rows for index in row]
        samples = iter(read_samples(self.dataset, members))
        return [[next(samples)._replace(group=int(self._share[index])) for index in row] for row in rows]

    def row(self, numbers: Sequence[int], lines: Sequence[Line], length: int) -> Row:
        """The lines `numbers` as one row, each a forest of its own that begins at the edge of a block."""
        ends = self._trees.filled(length).lines.tokens
        samples: list[Sample] = []
        share: list[tuple[int, int]] = []
        for place, (number, line) in enumerate(zip(numbers, lines, strict=True)):
            missing = int(ends[number] - self._trees.lines.tokens[number])
            samples += [*line, padding_document(missing)]
            share += [*((place, sample.group) for sample in line), (place, -1)]
        _, tree = np.unique(np.array(share, np.int64).reshape(-1, 2), axis=0, return_inverse=True)
        return tree_row(samples, tree.reshape(-1).astype(np.int64))

    def _read_all(self) -> list[Sample]:
        return [
            sample
            for start in range(0, len(self.dataset), 4096)
            for sample in read_samples(self.dataset, range(start, min(start + 4096, len(self.dataset))))
        ]
