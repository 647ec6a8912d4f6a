"""The fixed set of shapes that batches are padded to, so that few programs are compiled (DESIGN.md section 8).

A batch's class is a pure function of what its rows need and of the set. Under `auto` the token sizes have two
significant bits (128, 256, 384, 512, 768, 1,024, 1,536, ...); slots and lanes follow the token size in a few steps, so
that a program is one (tokens, slots, lanes) class. What a run's batches need is known before its first step: `fit`
then lists the classes, merged upwards until they are few enough.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from .batch import Row, ShapeClass
from .blocks import DEFAULT_BLOCK_SIZE
from .merge import best_sizes, cost, covering_classes, merge_classes
from .needs import Need, Needs, need_of

AUTO_UNIT = 128  # tokens; `auto` and slots count in this unit whatever the block size
AUTO_PROGRAMS = 12  # classes of a run under `auto`
MERGED_AT_ONCE = 1000  # classes; where a rule gives more, merging starts from those of `auto`
SETTINGS = '"auto", a multiple such as 128, "optimal:K", "fixed:N" or "none"'


@dataclass(frozen=True)
class ShapeSet:
    """Which shapes batches may have.

    `rule` is "auto", "multiple" (of `size` tokens), "none" (exact, only the last block is filled), "fixed" (always
    `size` tokens) or "optimal" (`size` classes chosen by `fit`). With `classes` (fewest tokens first) a batch takes the
    first class that holds it; where none does, that of the rule ("optimal": of "auto").
    """

    rule: str
    size: int = 0
    block_size: int = DEFAULT_BLOCK_SIZE
    classes: tuple[ShapeClass, ...] = ()

    @classmethod
    def from_setting(cls, setting: str | int, block_size: int = DEFAULT_BLOCK_SIZE) -> "ShapeSet":
        """The set that `pad_to_multiple_of` names: "auto", an int, "optimal:K", "fixed:N" or "none"; else raises."""
        if setting in ("auto", "none"):
            return cls(str(setting), 0, block_size)
        rule, _, number = str(setting).rpartition(":")
        known = not isinstance(setting, bool) and rule in ("", "fixed", "optimal")
        if not known or not number.isdecimal() or int(number) < 1:
            raise ValueError(f"pad_to_multiple_of is {setting!r}: give {SETTINGS}")
        if rule == "fixed" and int(number) % block_size:
            raise ValueError(
                f"pad_to_multiple_of is {setting!r}: {number} is no multiple of the block size {block_size}"
            )
        return cls(rule or "multiple", int(number), block_size)

    def fit(self, needs: Needs, max_programs: int | None = None) -> "ShapeSet":
        """The set for a run whose batches need `needs`: at most `max_programs` classes (None: 12 under "auto").

        A set whose rule gives few enough stays as it is; else classes are merged upwards, always the two that add the
        least cost. "optimal" lists the token sizes that waste least, "fixed" its one, each with the slots and lanes
        that its batches need. Deterministic; the same batches in another order give the same set.
        """
        limit = AUTO_PROGRAMS if max_programs is None and self.rule == "auto" else max_programs
        if not len(needs.tokens):
            return self
        if self.rule == "optimal":
            sizes = best_sizes(needs.tokens, min(self.size, limit or self.size), self.block_size)
            return self._with(covering_classes(needs, sizes, AUTO_UNIT))
        if self.rule == "fixed":
            largest = Need(*(int(field.max()) for field in needs))
            return self._with([self._rounded(largest, self.token_class(largest.tokens))])
        counts = Counter(map(self._by_rule, needs.each()))
        if limit is None or len(counts) <= limit:
            return self
        if len(counts) > MERGED_AT_ONCE:
            counts = Counter(map(replace(self, rule="auto")._by_rule, needs.each()))
        return self._with(merge_classes(counts, limit, self.block_size))

    def token_class(self, tokens: int) -> int:
        """The padded length of a row of `tokens` tokens by the rule: a positive multiple of the block size."""
        tokens = max(tokens, 1)
        if self.rule in ("auto", "optimal"):
            return _two_bits(tokens, math.lcm(AUTO_UNIT, self.block_size))
        if self.rule == "fixed":
            if tokens > self.size:
                raise ValueError(
                    f"a row has {tokens} tokens but the shape is fixed at {self.size}: raise pad_to_multiple_of"
                )
            return self.size
        return _round_up(_round_up(tokens, self.size or 1), self.block_size)

    def class_of(self, need: Need) -> ShapeClass:
        """The class of a batch whose largest rows need this. Raises ValueError for more tokens than "fixed" has."""
        for shape in self.classes:
            if all(map(int.__le__, need[:4], shape)):
                return shape
        return self._by_rule(need)

    def classify(self, rows: Sequence[Row]) -> ShapeClass:
        """The class of a batch of one row per device."""
        return self.class_of(need_of(rows, self.block_size))

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

    def _by_rule(self, need: Need) -> ShapeClass:
        """The sizes rounded up by the rule; terms are never fewer than slots (in SFT they are equal)."""
        tokens = self.token_class(need.tokens)
        if self.rule == "none":
            slots = max(1, need.slots)
            return ShapeClass(tokens, slots, max(slots, need.terms), max(1, need.lanes))
        if self.rule == "fixed":
            slots = _doubled(tokens, need.slots)
            return ShapeClass(tokens, slots, _doubled(slots, need.terms), _all_lanes(tokens // self.block_size))
        return self._rounded(need, tokens)

    def _rounded(self, need: Need, tokens: int) -> ShapeClass:
        """Slots and lanes that follow `tokens` in a few steps."""
        slots = _slot_class(need, tokens)
        return ShapeClass(
            tokens, slots, _doubled(slots, need.terms), _lane_class(need.lanes, tokens // self.block_size)
        )

    def _with(self, classes: Sequence[ShapeClass]) -> "ShapeSet":
        def order(shape: ShapeClass) -> tuple:
            return shape.tokens, cost(shape, self.block_size), shape

        return replace(self, classes=tuple(sorted(set(classes), key=order)))


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


def _slot_class(need: Need, tokens: int) -> int:
    """N, the two-bit multiple of 128 below N, or that halved down to N / 16; a multiple of N where a trie forks a lot.

    The first token of each sample counts here, so that rows with all tokens trained have N slots: one class, not two.
    """
    count = max(1, need.slots + need.starts)
    units = (tokens - 1) // AUTO_UNIT
    step = 1 << max(0, units.bit_length() - 2)
    below = units // step * step * AUTO_UNIT or tokens // 2
    if count > below:
        return _doubled(tokens, need.slots)
    while below // 2 >= max(count, tokens // 16):
        below //= 2
    return below


def _all_lanes(blocks: int) -> int:
    """Lanes of a row in which each token sees all before it: no row of this length needs more."""
    return max(1, blocks * (blocks - 1) // 2)


def _lane_class(need: int, blocks: int) -> int:
    """2.5, 5, 10, ... lanes per block, at most what one causal sequence needs."""
    return min(_doubled((5 * blocks + 1) // 2, need), _all_lanes(blocks))
