"""What rows need of a shape class, from the lengths of their documents alone: no array per token, no model.

A run's batches are known before its first step, so the shape set, the plan and the trainer all ask here.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from .batch import Row, pad_visible
from .blocks import DEFAULT_BLOCK_SIZE, needed_blocks


class Need(NamedTuple):
    """The exact sizes of a row, or the largest over the rows of a batch: tokens, slots, terms, lanes.

    `starts` counts the tokens at position 0: no token predicts them, so `slots + starts` of a row whose tokens are all
    trained is its number of tokens.
    """

    tokens: int
    slots: int
    terms: int
    lanes: int
    starts: int


class Needs(NamedTuple):
    """`Need` of many rows (or batches), field by field. int64."""

    tokens: Int[np.ndarray, " rows"]
    slots: Int[np.ndarray, " rows"]
    terms: Int[np.ndarray, " rows"]
    lanes: Int[np.ndarray, " rows"]
    starts: Int[np.ndarray, " rows"]

    def each(self) -> list[Need]:
        """One by one, in their order."""
        return [Need(*sizes) for sizes in np.stack(self, axis=1).tolist()]

    def largest(self, devices: int) -> "Needs":
        """Of each batch of `devices` consecutive rows the largest, field by field."""
        return Needs(*(field.reshape(-1, devices).max(axis=1) for field in self))


def stack_needs(each: Sequence[Need]) -> Needs:
    """`Needs` of batches that were looked at one by one."""
    return Needs(*np.array(each, np.int64).reshape(-1, len(Need._fields)).T)


def need_of(rows: Sequence[Row], block_size: int = DEFAULT_BLOCK_SIZE) -> Need:
    """What a batch of these rows needs. Raises ValueError without rows."""
    if not rows:
        raise ValueError("a batch needs one row per device but has none")
    return Need(
        max(len(row.input_ids) for row in rows),
        max(len(row.slot_index) for row in rows),
        max(len(row.term_slot) for row in rows),
        max(_count_lanes(row, block_size) for row in rows),
        max(int(np.count_nonzero(row.position_ids == 0)) for row in rows),
    )


def _count_lanes(row: Row, block_size: int) -> int:
    blocks = max(1, -(-len(row.visible_until) // block_size))
    return needed_blocks(pad_visible(row.visible_until, blocks * block_size), block_size) - blocks


@runtime_checkable
class LineNeeds(Protocol):
    """What lines need, alone or several in a row: `Documents`, and the trainer's tree lines."""

    @property
    def line_count(self) -> int:
        """Number of lines."""

    def needs(self, rows: Sequence[Sequence[int]], block_size: int = DEFAULT_BLOCK_SIZE) -> Needs:
        """What each row of these lines needs."""

    def filled(self, length: int) -> "LineNeeds":
        """The same for lines that are filled up to `length` tokens by padding."""


class Documents(NamedTuple):
    """The documents of lines: those of line `i` are the entries `first[i]` to `first[i + 1]` of the other two. int64.

    A line is one sequence, or the fragments of one packed row; `trained` counts the tokens of a document that are
    predicted.
    """

    lengths: Int[np.ndarray, " documents"]
    trained: Int[np.ndarray, " documents"]
    first: Int[np.ndarray, " lines_and_1"]

    @property
    def line_count(self) -> int:
        """Number of lines."""
        return len(self.first) - 1

    def needs(self, rows: Sequence[Sequence[int]], block_size: int = DEFAULT_BLOCK_SIZE) -> Needs:
        """What `concat_rows` of the lines of each row needs: their documents one after another, none sees another."""
        lines = np.array([line for row in rows for line in row], np.int64)
        row_of_line = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
        counts = self.first[lines + 1] - self.first[lines]
        before = np.cumsum(counts) - counts
        document = np.repeat(self.first[lines] - before, counts) + np.arange(counts.sum())
        return flat_needs(
            self.lengths[document], self.trained[document], np.repeat(row_of_line, counts), len(rows), block_size
        )

    def filled(self, length: int) -> "Documents":
        """Each line filled up to `length` tokens by one more document, of which nothing is trained (it may be empty).

        Raises ValueError where a line is longer.
        """
        ends = np.append(0, np.cumsum(self.lengths))[self.first]
        missing = length - np.diff(ends)
        if missing.size and missing.min() < 0:
            raise ValueError(f"line {missing.argmin()} is longer than {length} tokens: it cannot be filled up to that")
        lengths = np.insert(self.lengths, self.first[1:], missing)
        trained = np.insert(self.trained, self.first[1:], 0)
        return Documents(lengths, trained, self.first + np.arange(len(self.first)))


def flat_needs(
    lengths: Int[np.ndarray, " documents"],
    trained: Int[np.ndarray, " documents"],
    row: Int[np.ndarray, " documents"],
    rows: int,
    block_size: int = DEFAULT_BLOCK_SIZE,
) -> Needs:
    """Needs of `rows` rows; document `i` stands in row `row[i]` (never falling), behind those before it.

    A document that reaches over k + 1 blocks needs a lane for each pair of them, k (k + 1) / 2, whatever lies around
    it: of each block the last token decides which later blocks see it.
    """
    ends = np.cumsum(lengths)
    total = np.bincount(row, lengths, minlength=rows).astype(np.int64)
    ends -= (np.cumsum(total) - total)[row]
    spans = np.maximum((ends - 1) // block_size - (ends - lengths) // block_size, 0)
    slots = np.bincount(row, trained, minlength=rows).astype(np.int64)
    lanes = np.bincount(row, spans * (spans + 1) // 2, minlength=rows).astype(np.int64)
    starts = np.bincount(row, lengths > 0, minlength=rows).astype(np.int64)
    return Needs(total, slots, slots, lanes, starts)
