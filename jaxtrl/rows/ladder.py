"""The fixed set of shapes that batches are padded to, so that few programs are compiled (DESIGN.md section 8).

A batch's class is a pure function of its rows and of the set. Under `auto` the token sizes have two significant bits
(128, 256, 384, 512, 768, 1,024, 1,536, ...); slots and lanes follow the token size in a few steps, so that a program is
one (tokens, slots, lanes) class. Measured over 500 batches of 4 multi-turn chats with all tokens trained: 11 programs,
17 % padding, 1.31 attention blocks visited per needed one; cut to 512 tokens: 4 programs, 15 %, 1.37. With
assistant-only loss the slots vary too: 21 and 10 programs, with 17 and 19 % unused slots.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .batch import Row, ShapeClass, pad_visible
from .blocks import DEFAULT_BLOCK_SIZE, count_lanes

AUTO_UNIT = 128  # tokens; `auto` and slots count in this unit whatever the block size
SETTINGS = '"auto", a multiple such as 128, "none" or "fixed:N"'


@dataclass(frozen=True)
class ShapeSet:
    """Which shapes batches may have.

    `rule` is "auto", "multiple" (of `size` tokens), "none" (exact, only the last block is filled) or "fixed" (always
    `size` tokens). With `classes` (smallest first) a batch takes the first class that holds it; none is an error.
    """

    rule: str
    size: int = 0
    block_size: int = DEFAULT_BLOCK_SIZE
    classes: tuple[ShapeClass, ...] = ()

    @classmethod
    def from_setting(cls, setting: str | int, block_size: int = DEFAULT_BLOCK_SIZE) -> "ShapeSet":
        """The set that `pad_to_multiple_of` names: "auto", an int, "none" or "fixed:N"; anything else raises."""
        if setting in ("auto", "none"):
            return cls(str(setting), 0, block_size)
        rule, _, number = str(setting).rpartition(":")
        if isinstance(setting, bool) or rule not in ("", "fixed") or not number.isdecimal() or int(number) < 1:
            raise ValueError(f"pad_to_multiple_of is {setting!r}: give {SETTINGS}")
        if rule == "fixed" and int(number) % block_size:
            raise ValueError(
                f"pad_to_multiple_of is {setting!r}: {number} is no multiple of the block size {block_size}"
            )
        return cls(rule or "multiple", int(number), block_size)

    def token_class(self, tokens: int) -> int:
        """The padded length of a row of `tokens` tokens by the rule: a positive multiple of the block size."""
        tokens = max(tokens, 1)
        if self.rule == "auto":
            return _two_bits(tokens, math.lcm(AUTO_UNIT, self.block_size))
        if self.rule == "fixed":
            if tokens > self.size:
                raise ValueError(
                    f"a row has {tokens} tokens but the shape is fixed at {self.size}: raise pad_to_multiple_of"
                )
            return self.size
        return _round_up(_round_up(tokens, self.size or 1), self.block_size)

    def classify(self, rows: Sequence[Row]) -> ShapeClass:
        """The class of a batch of one row per device: the largest row in each dimension, rounded up by the set.

        Raises ValueError when the set is bounded ("fixed:N", `classes`) and does not hold the batch.
        """
        if self.classes:
            return self._listed_class(rows)
        need = self._needed(rows, self.token_class(_most(rows, "input_ids")))
        if self.rule == "none":
            return need
        blocks = need.tokens // self.block_size
        if self.rule == "fixed":
            slots, lanes = _doubled(need.tokens, need.slots), _all_lanes(blocks)
        else:
            slots, lanes = _slot_class(rows, need), _lane_class(need.lanes, blocks)
        return ShapeClass(need.tokens, slots, _doubled(slots, need.terms), lanes)

    def to_json(self) -> dict[str, Any]:
        """A JSON object; `from_json` gives the same set back."""
        return {
            "rule": self.rule,
            "size": self.size,
            "block_size": self.block_size,
            "classes": [list(shape) for shape in self.classes],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "ShapeSet":
        """The set that `to_json` wrote."""
        classes = tuple(ShapeClass(*shape) for shape in data["classes"])
        return cls(data["rule"], data["size"], data["block_size"], classes)

    def _needed(self, rows: Sequence[Row], tokens: int) -> ShapeClass:
        """The exact sizes of the batch at this row length; terms are never fewer than slots (in SFT they are equal)."""
        slots = max(1, _most(rows, "slot_index"))
        lanes = max(count_lanes(pad_visible(row.visible_until, tokens), self.block_size) for row in rows)
        return ShapeClass(tokens, slots, max(slots, _most(rows, "term_slot")), lanes)

    def _listed_class(self, rows: Sequence[Row]) -> ShapeClass:
        tokens = _most(rows, "input_ids")
        for shape in self.classes:
            if tokens <= shape.tokens and all(map(int.__le__, self._needed(rows, shape.tokens), shape)):
                return shape
        need = self._needed(rows, _round_up(max(tokens, 1), self.block_size))
        raise ValueError(
            f"a batch needs {need} but the largest shape of this run is {self.classes[-1]}: start anew with this data"
        )


def _most(rows: Sequence[Row], name: str) -> int:
    if not rows:
        raise ValueError("a batch needs one row per device but has none")
    return max(len(getattr(row, name)) for row in rows)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _two_bits(value: int, unit: int) -> int:
    """`value` rounded up to `unit` times a number with at most two significant bits (1, 2, 3, 4, 6, 8, 12, ...)."""
    units = -(-value // unit)
    step = 1 << max(0, units.bit_length() - 2)
    return _round_up(units, step) * unit


def _doubled(size: int, need: int) -> int:
    """`size` times the least power of two that reaches `need`."""
    while size < need:
        size *= 2
    return size


def _slot_class(rows: Sequence[Row], need: ShapeClass) -> int:
    """N, the two-bit multiple of 128 below N, or that halved down to N / 16; a multiple of N where a trie forks a lot.

    The first token of each sample counts here, so that rows with all tokens trained have N slots: one class, not two.
    """
    count = max(1, *(len(row.slot_index) + int(np.count_nonzero(row.position_ids == 0)) for row in rows))
    units = (need.tokens - 1) // AUTO_UNIT
    step = 1 << max(0, units.bit_length() - 2)
    below = units // step * step * AUTO_UNIT or need.tokens // 2
    if count > below:
        return _doubled(need.tokens, need.slots)
    while below // 2 >= max(count, need.tokens // 16):
        below //= 2
    return below


def _all_lanes(blocks: int) -> int:
    """Lanes of a row in which each token sees all before it: no row of this length needs more."""
    return max(1, blocks * (blocks - 1) // 2)


def _lane_class(need: int, blocks: int) -> int:
    """2.5, 5, 10, ... lanes per block, at most what one causal sequence needs."""
    return min(_doubled((5 * blocks + 1) // 2, need), _all_lanes(blocks))
