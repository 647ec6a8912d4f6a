"""From a tokenised data set to the batches of each optimizer step, in an order that can be taken up anywhere.

A *line* is what `per_device_train_batch_size` counts: one sequence, or one packed row. The lines of a device's
micro-batch become one token row.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from datasets import Dataset, IterableDataset
from jaxtyping import Int

from jaxtrl.rows.batch import Row, RowBatch, Sample, ShapeClass, concat_rows, make_batch
from jaxtrl.rows.blocks import DEFAULT_BLOCK_SIZE
from jaxtrl.rows.ladder import ShapeSet
from jaxtrl.rows.needs import Documents, LineNeeds, Needs, need_of
from jaxtrl.rows.order import BatchSizes, DataPosition, epoch_order, micro_batches
from jaxtrl.rows.pack import Fragment, cut_sample, pack_indices
from jaxtrl.rows.window import window_order

STREAM_LOT = 1000  # sequences of a stream that are packed together, as in TRL
Line = list[Sample]  # the sequences of one line


class Packing(NamedTuple):
    """How sequences are packed: `strategy` of `pack_indices`, `length` tokens per packed row, attention blocks."""

    strategy: str
    length: int
    block_size: int = DEFAULT_BLOCK_SIZE


class MicroBatch(NamedTuple):
    """One padded batch with its shape class and counts: of all devices, or of those of this process."""

    shape: ShapeClass
    batch: RowBatch
    tokens: int  # of all samples
    distinct: int  # row tokens without padding: fewer where samples share
    padded: int  # with padding
    slots: int  # positions that go through the LM head, without padding
    pairs: int  # (query, key) pairs that attention needs


class Lines:
    """The lines of a tokenised data set in memory or on disk (columns input_ids, loss_mask)."""

    def __init__(self, dataset: Dataset, packing: Packing | None = None):
        self.dataset = dataset.with_format("arrow")
        self.packing = packing
        lengths, trained = count_tokens(self.dataset)
        self._packs: list[list[Fragment]] | None = None
        self.documents: LineNeeds = Documents(lengths, trained, np.arange(len(lengths) + 1))
        if packing is not None:
            self._packs = pack_indices(lengths, packing.length, packing.strategy)
            self.documents = _packed_documents(self.dataset, self._packs, lengths, trained)
        self.count = self.documents.line_count
        self.fingerprint = zlib.crc32(np.stack([lengths, trained]).tobytes())

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

    def row(self, numbers: Sequence[int], lines: Sequence[Line], length: int) -> Row:
        """The lines `numbers` as one row, each filled up to `length` tokens (0: as they are)."""
        return _concat_lines(lines, length)

    def filled(self, length: int) -> LineNeeds:
        """What the lines need as `row` lays them out."""
        return self.documents.filled(length) if length else self.documents

    def describe(self) -> str:
        """What is packed into what, for the log."""
        return "" if self.packing is None else f", packed into {self.count:,} rows"


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

    def row(self, numbers: Sequence[Line], lines: Sequence[Line], length: int) -> Row:
        return _concat_lines(lines, length)

    def describe(self) -> str:
        return "" if self.packing is None else ", packed into a stream of rows"

    def _lines(self) -> Iterator[Line]:
        samples = (make_sample(row["input_ids"], row["loss_mask"]) for row in self.dataset)
        if self.packing is None:
            yield from ([sample] for sample in samples)
            return
        while lot := list(islice(samples, STREAM_LOT)):
            lengths = np.array([len(sample.input_ids) for sample in lot])
            for pack in pack_indices(lengths, self.packing.length, self.packing.strategy):
                yield [cut_sample(lot[index], start, stop) for index, start, stop in pack]


def _concat_lines(lines: Sequence[Line], length: int) -> Row:
    """One row; lines that are shorter than `length` are filled up."""
    filled = [[*line, padding_document(length - sum(len(sample.input_ids) for sample in line))] for line in lines]
    return concat_rows([sample for line in (filled if length else lines) for sample in line])


def padding_document(tokens: int) -> Sample:
    """A document of padding that nothing else sees and of which nothing is trained."""
    return Sample(np.zeros(max(tokens, 0), np.int32), np.zeros(max(tokens, 0), np.bool_))


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


def count_tokens(dataset: Dataset) -> tuple[Int[np.ndarray, "n"], Int[np.ndarray, "n"]]:
    """Tokens and trained tokens of each row of a data set in Arrow format."""
    lengths, trained = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for table in dataset.iter(batch_size=4096):
        masks = _lists(table.column("loss_mask"))
        lengths.append(np.array([len(mask) for mask in masks], np.int64))
        trained.append(np.array([np.count_nonzero(mask[1:]) for mask in masks], np.int64))
    return np.concatenate(lengths), np.concatenate(trained)


def _packed_documents(
    dataset: Dataset, packs: list[list[Fragment]], lengths: Int[np.ndarray, "n"], trained: Int[np.ndarray, "n"]
) -> Documents:
    """The documents of packed lines; those that were cut are counted anew."""
    index, start, stop = np.array([piece for pack in packs for piece in pack], np.int64).reshape(-1, 3).T
    counts = trained[index]
    cut = np.flatnonzero(stop - start < lengths[index])
    for part in np.split(cut, range(1024, len(cut), 1024)):
        for piece, sample in zip(part.tolist(), read_samples(dataset, index[part].tolist()), strict=True):
            counts[piece] = np.count_nonzero(sample.loss_mask[start[piece] + 1 : stop[piece]])
    return Documents(stop - start, counts, np.append(0, np.cumsum([len(pack) for pack in packs])).astype(np.int64))


# Batches


class RunBatches(NamedTuple):
    """What the micro-batches of a run need, known before its first step from lengths alone. int64[m]."""

    step: Int[np.ndarray, " m"]  # optimizer step within the run, from 0
    needs: Needs  # the largest row of each, field by field
    tokens: Int[np.ndarray, " m"]  # of all devices, without padding
    blocks: Int[np.ndarray, " m"]  # block pairs that attention needs, of all devices


class Batches:
    """Builds the micro-batches of a run: lines to one token row per device, padded to a class of `shapes`.

    Of several processes each builds the rows `own` of a batch (None: all), whose class is that of the whole batch.

    Under the setting "auto" packed rows have one class for the whole run, whichever of them an epoch's order brings
    together; if their length is a multiple of the attention block, each starts at the edge of a block.
    """

    def __init__(
        self,
        lines: Lines | StreamLines,
        per_device: int,
        setting: str | int = "auto",
        block: int | None = None,
        max_programs: int | None = None,
        window: int = 1,
        own: range | None = None,
    ):
        self.lines, self.own = lines, own
        if block is None:
            block = DEFAULT_BLOCK_SIZE if lines.packing is None else lines.packing.block_size
        self.block = block
        self.per_device = per_device
        self.max_programs = max_programs
        self.window = window
        one_class = lines.packing is not None and setting == "auto"
        self._one_class = one_class
        length = _line_length(lines, block) if one_class else 0
        self._line_length = length if length % block == 0 else 0
        self._documents = lines.filled(self._line_length) if isinstance(lines, Lines) else None
        self.shapes = ShapeSet.from_setting(setting, block)
        if one_class:
            self.shapes = _packed_shapes(length, self._documents, per_device, block)
        if self._documents is None:
            known = {f"pad_to_multiple_of {setting}": self.shapes.rule == "optimal"}
            known |= {"max_programs": max_programs is not None, "batch_window": window > 1}
            for name in (name for name, is_set in known.items() if is_set):
                raise ValueError(f"{name} needs the lengths of all rows, which a stream does not tell: leave it out")

    def build(self, devices: Sequence[Sequence[Any]]) -> MicroBatch:
        """The batch of the lines that each device gets (some may get none)."""
        own = slice(0, len(devices)) if self.own is None else slice(self.own.start, self.own.stop)
        is_stream = isinstance(self.lines, StreamLines)  # whose lengths are known only when all rows are built
        built = devices if is_stream else devices[own]
        loaded = iter(self.lines.load([item for items in built for item in items]))
        parts = [list(islice(loaded, len(items))) for items in built]
        rows = [self.lines.row(items, lines, self._line_length) for items, lines in zip(built, parts, strict=True)]
        if isinstance(self.lines, StreamLines):
            need, rows, parts = need_of(rows, self.block), rows[own], parts[own]
        else:
            assert self._documents is not None
            (need,) = self._documents.needs(devices, self.block).largest(len(devices)).each()
        tokens = distinct = sum(len(sample.input_ids) for lines in parts for line in lines for sample in line)
        if isinstance(self.lines, Lines):
            distinct = int(self.lines.documents.needs(built, self.block).tokens.sum())
        shape = self.shapes.class_of(need)
        return MicroBatch(
            shape,
            make_batch(rows, shape, self.block),
            tokens=tokens,
            distinct=distinct,
            padded=len(rows) * shape.tokens,
            slots=sum(len(row.slot_index) for row in rows),
            pairs=sum(count_pairs(row) for row in rows),
        )

    def foresee(
        self, sizes: BatchSizes, steps: int, seed: int, shuffle: bool, start: DataPosition = DataPosition()
    ) -> RunBatches:
        """The micro-batches of the `steps` optimizer steps from `start`, without building them. Not of a stream."""
        windows = [parts for parts, _ in islice(sizes.steps(self._items(sizes, seed, shuffle), start), steps)]
        return self._needs(windows, sizes.devices)

    def foresee_in_order(self, devices: int) -> RunBatches:
        """The batches of `in_order`, each a step. Not of a stream."""
        return self._needs([[parts] for parts in self._in_order(devices)], devices)

    def fit(self, run: RunBatches) -> None:
        """Choose the classes for a run with these batches."""
        fitted = self.shapes.fit(run.needs, self.max_programs)
        if self._one_class and self.shapes.classes and fitted.classes:
            shape = ShapeClass(*map(min, self.shapes.classes[0], fitted.classes[0]))  # both hold every batch
            fitted = replace(fitted, classes=(shape,))
        self.shapes = fitted

    def _needs(self, windows: list[list[list[list[int]]]], devices: int) -> RunBatches:
        assert self._documents is not None
        assert isinstance(self.lines, Lines)
        rows = [row for parts in windows for rows in parts for row in rows]
        needs = self._documents.needs(rows, self.block)
        tokens = self.lines.documents.needs(rows, self.block).tokens  # without what fills lines up
        blocks = -(-needs.tokens // self.block) + needs.lanes
        step = np.repeat(np.arange(len(windows)), [len(parts) for parts in windows])
        of_devices = [field.reshape(-1, devices).sum(axis=1) for field in (tokens, blocks)]
        return RunBatches(step, needs.largest(devices), *of_devices)

    def in_order(self, devices: int) -> Iterator[MicroBatch]:
        """All lines once, in the order of the data (evaluation)."""
        return map(self.build, self._in_order(devices))

    def _in_order(self, devices: int) -> Iterator[list[list[Any]]]:
        return micro_batches(self.lines.epoch(0, 0, shuffle=False), self.per_device, devices)

    def epoch_steps(
        self, sizes: BatchSizes, start: DataPosition, seed: int, shuffle: bool
    ) -> Iterator[tuple[list[MicroBatch], DataPosition]]:
        """The optimizer steps from `start` to the end of its epoch: their micro-batches and the position after them."""
        for parts, position in sizes.steps(self._items(sizes, seed, shuffle), start):
            yield [self.build(devices) for devices in parts], position
            if position.epoch > start.epoch:
                return

    def _items(self, sizes: BatchSizes, seed: int, shuffle: bool) -> Callable[[int, int], Iterable[Any]]:
        """(epoch, offset) -> the lines of the epoch from there on."""
        if self.window == 1:
            return lambda epoch, offset: self.lines.epoch(seed, epoch, offset, shuffle)
        assert self._documents is not None
        tokens = self._documents.needs([[line] for line in range(self._documents.line_count)]).tokens
        by_rule = None if self.shapes.rule in ("optimal", "fixed") else replace(self.shapes, classes=()).token_class

        def items(epoch: int, offset: int) -> list[int]:
            order = np.array(self.lines.epoch(seed, epoch, 0, shuffle), np.int64)
            return window_order(order, tokens, sizes.per_device, sizes.devices, self.window, by_rule)[offset:].tolist()

        return items


def count_pairs(row: Row) -> int:
    """(query, key) pairs of tokens that see each other."""
    return int((row.visible_until - np.arange(len(row.visible_until))).sum())


def _line_length(lines: Lines | StreamLines, block: int) -> int:
    """The tokens of a packed row: as many as asked for, or fewer where the data cannot fill a single one."""
    assert lines.packing is not None
    length = lines.packing.length
    if isinstance(lines, StreamLines):
        return length
    longest = int(lines.documents.needs([[line] for line in range(lines.count)], block).tokens.max(initial=1))
    return min(length, longest if length % block else -(-longest // block) * block)


def _packed_shapes(length: int, documents: LineNeeds | None, per_device: int, block: int) -> ShapeSet:
    """One class that holds any `per_device` packed rows of `length` tokens (all of them, where there are fewer).

    Slots: the most trained tokens that so many rows can have (of a stream, whose rows are not known: all tokens).
    Lanes: the most that so many rows can need. Of a stream: a packed row of c blocks has at most c (c - 1) / 2 pairs of
    blocks below the diagonal; where rows do not start at the edge of a block they reach over one more.
    """
    if documents is not None:
        per_device = min(per_device, documents.line_count)
    tokens = -(-per_device * length // block) * block
    reach = length // block - 1 if length % block == 0 else (length + block - 2) // block
    blocks = tokens // block
    slots, terms, lanes = tokens, tokens, min(per_device * reach * (reach + 1) // 2, blocks * (blocks - 1) // 2)
    if documents is not None:
        each = documents.needs([[line] for line in range(documents.line_count)], block)
        slots, terms = (int(np.sort(field)[-per_device:].sum()) for field in (each.slots, each.terms))
        if length % block == 0:
            lanes = int(np.sort(each.lanes)[-per_device:].sum())
    slots = min(tokens, max(block, -(-slots // block) * block))
    terms = max(slots, -(-terms // block) * block if terms > slots else slots)
    return ShapeSet("fixed", tokens, block, (ShapeClass(tokens, slots, terms, max(1, lanes)),))
