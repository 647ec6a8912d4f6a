"""Samples, token rows and the padded batches that a step takes (NumPy only).

A *sample* is one training sequence, a *row* is one device's micro-batch as a list of tokens (see DESIGN.md section 1),
a *batch* is one row per data-parallel device, padded to one shape class.
"""

from collections.abc import Sequence
from types import NoneType
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int, Int32

from .blocks import DEFAULT_BLOCK_SIZE, BlockTables, block_tables

LOGP_COLUMNS = ("old_logp", "ref_logp", "sampler_logp")
TERM_COLUMNS = ("advantage", *LOGP_COLUMNS)


class ShapeClass(NamedTuple):
    """The static sizes of one compiled program: row tokens N, head slots U, loss terms T, attention lanes M."""

    tokens: int
    slots: int
    terms: int
    lanes: int


class Sample(NamedTuple):
    """One training sequence of n tokens.

    `loss_mask[i]`: token i is trained, that is predicted from the tokens before it; entry 0 never makes a term.
    The advantage and the log-probs are None for supervised samples; entry i of a log-prob array belongs to token i.
    """

    input_ids: Int[np.ndarray, " n"]
    loss_mask: Bool[np.ndarray, " n"]
    advantage: float | None = None
    old_logp: Float32[np.ndarray, " n"] | None = None
    ref_logp: Float32[np.ndarray, " n"] | None = None
    sampler_logp: Float32[np.ndarray, " n"] | None = None
    group: int = 0


class Row(NamedTuple):
    """One token row without padding: n tokens, u slots, t terms. A column that no sample has is None."""

    input_ids: Int32[np.ndarray, " n"]
    position_ids: Int32[np.ndarray, " n"]
    visible_until: Int32[np.ndarray, " n"]
    slot_index: Int32[np.ndarray, " u"]
    slot_target: Int32[np.ndarray, " u"]
    term_slot: Int32[np.ndarray, " t"]
    term_sample: Int32[np.ndarray, " t"]
    weight: Float32[np.ndarray, " t"]
    advantage: Float32[np.ndarray, " t"] | None
    old_logp: Float32[np.ndarray, " t"] | None
    ref_logp: Float32[np.ndarray, " t"] | None
    sampler_logp: Float32[np.ndarray, " t"] | None
    denominator: float


class RowBatch(NamedTuple):
    """What a step takes: D rows padded to one shape class (N tokens, U slots, T terms, M lanes). int32 and float32.

    Padding tokens see themselves only, padding slots point at token 0 and padding terms have weight 0. Without a column
    (None) the batch is another pytree, so a run must always give the same columns.
    """

    input_ids: Int32[np.ndarray, "D N"]
    position_ids: Int32[np.ndarray, "D N"]
    visible_until: Int32[np.ndarray, "D N"]
    slot_index: Int32[np.ndarray, "D U"]
    slot_target: Int32[np.ndarray, "D U"]
    term_slot: Int32[np.ndarray, "D T"]
    term_sample: Int32[np.ndarray, "D T"]
    weight: Float32[np.ndarray, "D T"]
    denominator: Float32[np.ndarray, " D"]
    advantage: Float32[np.ndarray, "D T"] | None
    old_logp: Float32[np.ndarray, "D T"] | None
    ref_logp: Float32[np.ndarray, "D T"] | None
    sampler_logp: Float32[np.ndarray, "D T"] | None
    tables: BlockTables


def concat_rows(samples: Sequence[Sample]) -> Row:
    """One packed row: the samples one after another, isolated from each other.

    Positions restart at 0 in each sample, `visible_until` is the end of the token's own sample, and each trained token
    (but never the first of a sample) gives one slot and one term of weight 1; `denominator` is the number of terms, so
    the loss is the token mean. No samples give an empty row (all padding once batched). Raises ValueError for arrays of
    unequal length and for columns that only some samples have.
    """
    lengths = check_samples(samples)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    total = int(lengths.sum())

    input_ids = _joined([sample.input_ids for sample in samples], np.int32)
    trained = _joined([sample.loss_mask for sample in samples], np.bool_)
    trained[starts[lengths > 0]] = False
    predicted = np.flatnonzero(trained)
    terms = len(predicted)
    owner = np.repeat(np.arange(len(samples)), lengths)[predicted]
    return Row(
        input_ids=input_ids,
        position_ids=(np.arange(total) - np.repeat(starts, lengths)).astype(np.int32),
        visible_until=np.repeat(ends, lengths).astype(np.int32),
        slot_index=(predicted - 1).astype(np.int32),
        slot_target=input_ids[predicted],
        term_slot=np.arange(terms, dtype=np.int32),
        term_sample=owner.astype(np.int32),
        weight=np.ones(terms, np.float32),
        denominator=float(terms),
        **term_columns(samples, predicted, owner),
    )


def make_batch(rows: Sequence[Row], shape: ShapeClass, block_size: int = DEFAULT_BLOCK_SIZE) -> RowBatch:
    """Pads one row per device to `shape` and adds the attention tables.

    Padding: id 0, position 0, `visible_until[j] = j + 1`, slots at token 0, weight 0. An empty row becomes all padding
    with denominator 0. Raises ValueError when a row does not fit `shape` or has a negative id, or when only some of the
    rows with terms have a column.
    """
    if not rows:
        raise ValueError("make_batch needs one row per device but got none; give an empty row to a device without data")
    for device, row in enumerate(rows):
        _check_fits(row, shape, device)
        if len(row.input_ids) and row.input_ids.min() < 0:
            raise ValueError(f"row of device {device} has the token id {row.input_ids.min()}: ids start at 0")
    visible_until = np.stack([pad_visible(row.visible_until, shape.tokens) for row in rows])
    tables = [block_tables(visible, block_size, shape.lanes) for visible in visible_until]
    columns = {name: _column_or_none(rows, name, shape.terms) for name in TERM_COLUMNS}
    return RowBatch(
        input_ids=_padded(rows, "input_ids", shape.tokens),
        position_ids=_padded(rows, "position_ids", shape.tokens),
        visible_until=visible_until,
        slot_index=_padded(rows, "slot_index", shape.slots),
        slot_target=_padded(rows, "slot_target", shape.slots),
        term_slot=_padded(rows, "term_slot", shape.terms),
        term_sample=_padded(rows, "term_sample", shape.terms),
        weight=_padded(rows, "weight", shape.terms),
        denominator=np.array([row.denominator for row in rows], dtype=np.float32),
        tables=BlockTables(*(np.stack(field) for field in zip(*tables, strict=True))),
        **columns,
    )


def pad_visible(visible_until: Int[np.ndarray, " n"], tokens: int) -> Int32[np.ndarray, " N"]:
    """`visible_until` of a row padded to `tokens`: padding token j sees itself only (j + 1) and nothing sees it."""
    out = np.arange(1, tokens + 1, dtype=np.int32)
    out[: len(visible_until)] = visible_until
    return out


def _joined(arrays: list, dtype: type) -> np.ndarray:
    return np.concatenate(arrays, dtype=dtype, casting="unsafe") if arrays else np.zeros(0, dtype)


def check_samples(samples: Sequence[Sample]) -> Int[np.ndarray, " samples"]:
    """The samples' lengths; raises ValueError for a sample whose arrays are not equally long."""
    fields = dict(zip(Sample._fields, zip(*samples, strict=True), strict=False))
    lengths = np.array([*map(len, fields.get("input_ids", ()))], dtype=np.int64)
    for name in ("loss_mask", *LOGP_COLUMNS):
        column = fields.get(name, ())
        if set(map(type, column)) <= {NoneType}:
            continue
        for number, (value, length) in enumerate(zip(column, lengths.tolist(), strict=True)):
            if value is not None and len(value) != length:
                raise ValueError(
                    f"sample {number}: {name} has {len(value)} entries but input_ids has {length}; "
                    "make them equally long"
                )
    return lengths


def term_columns(
    samples: Sequence[Sample], predicted: Int[np.ndarray, " t"], owner: Int[np.ndarray, " t"]
) -> dict[str, Any]:
    """`TERM_COLUMNS` of t terms: term i is the token `predicted[i]` of all samples joined, which is `owner[i]`'s.

    A column that no sample has is None; raises ValueError for one that only some have.
    """
    columns: dict[str, Any] = dict.fromkeys(TERM_COLUMNS)
    if _has_column(samples, "advantage"):
        columns["advantage"] = np.array([sample.advantage for sample in samples], dtype=np.float32)[owner]
    for name in LOGP_COLUMNS:
        if _has_column(samples, name):
            columns[name] = _joined([getattr(s, name) for s in samples], np.float32)[predicted]
    return columns


def _has_column(samples: Sequence[Sample], name: str) -> bool:
    missing = [number for number, sample in enumerate(samples) if getattr(sample, name) is None]
    if missing and len(missing) < len(samples):
        raise ValueError(f"sample {missing[0]} has no {name} but others of the row have; give it to all or to none")
    return bool(samples) and not missing


def _check_fits(row: Row, shape: ShapeClass, device: int) -> None:
    found = (len(row.input_ids), len(row.slot_index), len(row.term_slot))
    for name, count, limit in zip(("tokens", "slots", "terms"), found, shape[:3], strict=True):
        if count > limit:
            raise ValueError(
                f"row of device {device} has {count} {name} but its class holds {limit}; classify it again"
            )


def _padded(rows: Sequence[Row], name: str, size: int) -> np.ndarray:
    """Field `name` of each row, zeros at the end: [D, size]."""
    out = np.zeros((len(rows), size), np.asarray(getattr(rows[0], name)).dtype)
    for line, row in zip(out, rows, strict=True):
        value = getattr(row, name)
        line[: len(value)] = value
    return out


def _column_or_none(rows: Sequence[Row], name: str, size: int) -> np.ndarray | None:
    """Column `name` as [D, size], or None when no row has it; rows without a term may lack it."""
    present = [getattr(row, name) is not None for row in rows]
    if not any(present):
        return None
    out = np.zeros((len(rows), size), np.float32)
    for device, (line, row) in enumerate(zip(out, rows, strict=True)):
        value = getattr(row, name)
        if value is not None:
            line[: len(value)] = value
        elif len(row.term_slot):
            raise ValueError(f"row of device {device} has no {name} but other rows have; give it to all or to none")
    return out
