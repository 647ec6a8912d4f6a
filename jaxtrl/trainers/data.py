"""From a tokenised data set to the batches of each optimizer step, in an order that can be taken up anywhere.

A *line* is what `per_device_train_batch_size` counts: one sequence, or one packed row. The lines of a device's
micro-batch become one token row.
"""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from datasets import Dataset, IterableDataset
from jaxtyping import Int

from jaxtrl.rows.batch import Row, RowBatch, Sample, ShapeClass, concat_rows, make_batch
from jaxtrl.rows.blocks import DEFAULT_BLOCK_SIZE
from jaxtrl.rows.ladder import ShapeSet
from jaxtrl.rows.order import BatchSizes, DataPosition, epoch_order, micro_batches
from jaxtrl.rows.pack import Fragment, cut_sample, pack_indices, packed_lanes

STREAM_LOT = 1000  # sequences of a stream that are packed together, as in TRL
Line = list[Sample]  # the sequences of one line


class Packing(NamedTuple):
    """How sequences are packed: `strategy` of `pack_indices`, `length` tokens per packed row."""

    strategy: str
    length: int


class MicroBatch(NamedTuple):
    """One padded batch with its shape class and counts over all devices."""

    shape: ShapeClass
    batch: RowBatch
    tokens: int  # without padding
    padded: int  # with padding
    slots: int  # positions that go through the LM head, without padding
    pairs: int  # (query, key) pairs that attention needs


class Lines:
    """The lines of a tokenised data set in memory or on disk (columns input_ids, loss_mask)."""

    def __init__(self, dataset: Dataset, packing: Packing | None = None):
        self.dataset = dataset.with_format("arrow")
        self.packing = packing
        lengths, trained = _count_tokens(self.dataset)
        self._packs: list[list[Fragment]] | None = None
        if packing is not None:
            self._packs = pack_indices(lengths, packing.length, packing.strategy)
        self._trained = trained
        self.count = len(lengths) if self._packs is None else len(self._packs)
        self.fingerprint = zlib.crc32(np.stack([lengths, trained]).tobytes())

    def most_trained(self, lines: int) -> int:
        """Trained tokens that no choice of so many packed rows exceeds."""
        each = [
            sum(min(stop - start - 1, int(self._trained[index])) for index, start, stop in pack)
            for pack in self._packs or []
        ]
        return int(np.sort(each)[-lines:].sum()) if each else 0

    def most_lanes(self, lines: int, block: int) -> int:
        """Attention lanes that no choice of so many packed rows, each filled up with one document, exceeds."""
        assert self.packing is not None
        length = self.packing.length
        filled = [[*pack, (0, 0, length - sum(stop - start for _, start, stop in pack))] for pack in self._packs or []]
        each = packed_lanes(filled, length, block)
        return int(np.sort(each)[-lines:].sum())

    def epoch(self, seed: int, epoch: int, offset: int = 0, shuffle: bool = True) -> list[int]:
        """The numbers of the lines of an epoch in their order, from `offset` on."""
        return epoch_order(seed, epoch, self.count, shuffle)[offset:].tolist()

    def load(self, numbers: Sequence[int]) -> list[Line]:
        """The samples of these lines."""
        if self._packs is None:
            return [[sample] for sample in read_samples(self.dataset, numbers)]
        packs = [self._packs[number] for number in numbers]
        fragments = [fragment for pack in packs for fragment in pack]
        samples = read_samples(self.dataset, [index for index, _, _ in fragments])
        pieces = iter([cut_sample(s, start, stop) for s, (_, start, stop) in zip(samples, fragments, strict=True)])
        return [list(islice(pieces, len(pack))) for pack in packs]


class StreamLines:
    """The lines of a tokenised stream, in its order; every epoch reads the stream anew."""

    count: None = None
    fingerprint = 0

    def __init__(self, dataset: IterableDataset, packing: Packing | None = None):
        self.dataset = dataset
        self.packing = packing

    def epoch(self, seed: int, epoch: int, offset: int = 0, shuffle: bool = True) -> Iterator[Line]:
        """The lines of an epoch from `offset` on: those before it are read and skipped."""
        self.dataset.set_epoch(epoch)
        return islice(self._lines(), offset, None)

    def load(self, lines: Sequence[Line]) -> list[Line]:
        return list(lines)

    def _lines(self) -> Iterator[Line]:
        samples = (make_sample(row["input_ids"], row["loss_mask"]) for row in self.dataset)
        if self.packing is None:
            yield from ([sample] for sample in samples)
            return
        while lot := list(islice(samples, STREAM_LOT)):
            lengths = np.array([len(sample.input_ids) for sample in lot])
            for pack in pack_indices(lengths, self.packing.length, self.packing.strategy):
                yield [cut_sample(lot[index], start, stop) for index, start, stop in pack]


def make_sample(input_ids: Any, loss_mask: Any) -> Sample:
    return Sample(np.asarray(input_ids, np.int32), np.asarray(loss_mask, np.bool_))


def read_samples(dataset: Dataset, indices: Sequence[int]) -> list[Sample]:
    """The rows `indices` of a data set in Arrow format."""
    if not len(indices):
        return []
    table: pa.Table = dataset[list(indices)]
    ids, masks = (_lists(table.column(name)) for name in ("input_ids", "loss_mask"))
    return [make_sample(i, m) for i, m in zip(ids, masks, strict=True)]


def _lists(column: pa.ChunkedArray) -> list[np.ndarray]:
    lists = column.combine_chunks()
    values = lists.flatten().to_numpy(zero_copy_only=False)
    return np.split(values, np.cumsum(lists.value_lengths().to_numpy(zero_copy_only=False))[:-1])


def _count_tokens(dataset: Dataset) -> tuple[Int[np.ndarray, "n"], Int[np.ndarray, "n"]]:
    """Tokens and trained tokens of each row of a data set in Arrow format."""
    lengths, trained = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for table in dataset.iter(batch_size=4096):
        masks = _lists(table.column("loss_mask"))
        lengths.append(np.array([len(mask) for mask in masks], np.int64))
        trained.append(np.array([np.count_nonzero(mask[1:]) for mask in masks], np.int64))
    return np.concatenate(lengths), np.concatenate(trained)


# Batches


class Batches:
    """Builds the micro-batches of a run: lines to one token row per device, padded to a class of `shapes`.

    Under the setting "auto" packed rows have one class for the whole run, whichever of them an epoch's order brings
    together; if their length is a multiple of the attention block, each starts at the edge of a block.
    """

    def __init__(
        self,
        lines: Lines | StreamLines,
        per_device: int,
        setting: str | int = "auto",
        block: int = DEFAULT_BLOCK_SIZE,
    ):
        self.lines = lines
        self.block = block
        self.per_device = per_device
        one_class = lines.packing is not None and setting == "auto"
        self.shapes = _packed_shapes(lines, per_device, block) if one_class else ShapeSet.from_setting(setting, block)
        self._line_length = lines.packing.length if one_class and lines.packing is not None else 0

    def build(self, devices: Sequence[Sequence[Any]]) -> MicroBatch:
        """The batch of the lines that each device gets (some may get none)."""
        loaded = iter(self.lines.load([item for items in devices for item in items]))
        parts = [list(islice(loaded, len(items))) for items in devices]
        tokens = sum(len(sample.input_ids) for lines in parts for line in lines for sample in line)
        rows = [concat_rows([sample for line in lines for sample in self._filled(line)]) for lines in parts]
        shape = self.shapes.classify(rows)
        return MicroBatch(
            shape,
            make_batch(rows, shape, self.block),
            tokens=tokens,
            padded=len(rows) * shape.tokens,
            slots=sum(len(row.slot_index) for row in rows),
            pairs=sum(_count_pairs(row) for row in rows),
        )

    def _filled(self, line: Line) -> Line:
        """The line up to the edge of a block, where that is kept: by a document of padding that nothing else sees."""
        missing = self._line_length - sum(len(sample.input_ids) for sample in line)
        if missing <= 0 or self._line_length % self.block:
            return line
        return [*line, Sample(np.zeros(missing, np.int32), np.zeros(missing, np.bool_))]

    def in_order(self, devices: int) -> Iterator[MicroBatch]:
        """All lines once, in the order of the data (evaluation)."""
        for part in micro_batches(self.lines.epoch(0, 0, shuffle=False), self.per_device, devices):
            yield self.build(part)

    def epoch_steps(
        self, sizes: BatchSizes, start: DataPosition, seed: int, shuffle: bool
    ) -> Iterator[tuple[list[MicroBatch], DataPosition]]:
        """The optimizer steps from `start` to the end of its epoch: their micro-batches and the position after them."""

        def items(epoch: int, offset: int) -> Iterable[Any]:
            return self.lines.epoch(seed, epoch, offset, shuffle)

        for parts, position in sizes.steps(items, start):
            yield [self.build(devices) for devices in parts], position
            if position.epoch > start.epoch:
                return


def _count_pairs(row: Row) -> int:
    """(query, key) pairs of tokens that see each other."""
    return int((row.visible_until - np.arange(len(row.visible_until))).sum())


def _packed_shapes(lines: Lines | StreamLines, per_device: int, block: int) -> ShapeSet:
    """One class that holds any `per_device` packed rows.

    Slots: the most trained tokens that so many rows can have (of a stream, whose rows are not known: all tokens).
    Lanes: the most that so many rows can need. Of a stream: a packed row of c blocks has at most c (c - 1) / 2 pairs of
    blocks below the diagonal; where rows do not start at the edge of a block they reach over one more.
    """
    assert lines.packing is not None
    length = lines.packing.length
    tokens = -(-per_device * length // block) * block
    slots = lines.most_trained(per_device) if isinstance(lines, Lines) else tokens
    reach = length // block - 1 if length % block == 0 else (length + block - 2) // block
    blocks = tokens // block
    lanes = min(per_device * reach * (reach + 1) // 2, blocks * (blocks - 1) // 2)
    if isinstance(lines, Lines) and length % block == 0:
        lanes = lines.most_lanes(per_device, block)
    slots = min(tokens, max(block, -(-slots // block) * block))
    return ShapeSet("fixed", tokens, block, (ShapeClass(tokens, slots, slots, max(1, lanes)),))
