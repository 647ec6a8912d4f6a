"""Few classes for many batches: the token sizes that waste least, and the merging of classes that adds the least cost.

Costs are in tokens, weighed as in Qwen3-0.6B (forward FLOPs, 28 layers): a token 2 * 440 M, a slot of the LM head
2 * 155.6 M, a pair of visible tokens in attention 4 * 2,048 * 28.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Int

from .batch import ShapeClass
from .blocks import DEFAULT_BLOCK_SIZE
from .needs import Needs

SLOT_COST = 0.35  # tokens
PAIR_COST = 2.6e-4  # tokens: 4.3 for a lane of 128 x 128


def cost(shape: ShapeClass, block_size: int = DEFAULT_BLOCK_SIZE) -> float:
    """What a batch of this class costs a device, in tokens."""
    return shape.tokens + SLOT_COST * shape.slots + PAIR_COST * block_size**2 * shape.lanes


def best_sizes(tokens: Int[np.ndarray, " batches"], count: int, block_size: int = DEFAULT_BLOCK_SIZE) -> list[int]:
    """At most `count` row sizes, multiples of the block size, that hold these batches with the least padding.

    Exact, by dynamic programming over the histogram of sizes in blocks: `waste[k][i]`, the least sum of padded sizes
    of the first i different sizes in k groups, each padded to its largest, is the minimum over where the last group
    begins. O(count * sizes^2). Of equal choices the one of fewer, then smaller, sizes.
    """
    sizes, batches = np.unique(np.maximum(-(-tokens // block_size), 1), return_counts=True)
    before = np.append(0, np.cumsum(batches))  # batches before each size
    # padded[begin, end]: the sizes begin .. end as one group
    padded = np.where(before[1:] > before[:-1, None], (before[1:] - before[:-1, None]) * sizes, np.inf)
    best, begins = padded[0], []
    for _ in range(min(count, len(sizes)) - 1):
        # Group end (column) begins behind `begin` sizes, which the groups before it hold.
        with_begin = np.append(np.inf, best[:-1])[:, None] + padded
        begin = with_begin.argmin(axis=0)
        split = with_begin[begin, np.arange(len(sizes))]
        begins.append(np.where(split < best, begin, -1))  # -1: one group fewer is as good
        best = np.minimum(best, split)
    chosen, end = [], len(sizes)
    for begin in [*reversed(begins), np.zeros(len(sizes), np.int64)]:
        if end and (start := int(begin[end - 1])) >= 0:
            chosen.append(int(sizes[end - 1]) * block_size)
            end = start
    return chosen[::-1]


def covering_classes(needs: Needs, sizes: Sequence[int], unit: int) -> list[ShapeClass]:
    """For each token size the class that holds the batches that no smaller size holds: slots a multiple of `unit`."""
    group = np.searchsorted(np.array(sizes), needs.tokens)
    classes = []
    for number, size in enumerate(sizes):
        here = group == number
        slots, terms, lanes = (int(field[here].max()) for field in (needs.slots, needs.terms, needs.lanes))
        slots = max(slots, 1)
        slots = max(slots, min(-(-slots // unit) * unit, size))
        classes.append(ShapeClass(size, slots, max(slots, terms), max(1, lanes)))
    return classes


def merge_classes(
    counts: Mapping[ShapeClass, int], limit: int, block_size: int = DEFAULT_BLOCK_SIZE
) -> list[ShapeClass]:
    """At most `limit` classes that hold the `counts[c]` batches of each class c.

    Again and again the two classes are replaced by their join (the larger of each size) whose join adds the least cost
    over all batches; of equals the first in the order of the sizes.
    """
    shapes = np.array(sorted(counts), np.int64)
    weights = np.array([counts[ShapeClass(*shape)] for shape in shapes.tolist()], np.float64)
    alive = np.ones(len(shapes), bool)
    prices = np.array([1.0, SLOT_COST, 0.0, PAIR_COST * block_size**2])  # as in `cost`

    def added(i):  # what joining class i with each other class adds
        own = weights * (shapes @ prices)
        sums = np.maximum(shapes, shapes[i]) @ prices * (weights + weights[i]) - own - own[i]
        return np.where(alive & (np.arange(len(shapes)) != i), sums, np.inf)

    table = np.stack([added(i) for i in range(len(shapes))])
    for _ in range(len(shapes) - limit):
        i, j = map(int, np.unravel_index(table.argmin(), table.shape))
        shapes[i] = np.maximum(shapes[i], shapes[j])
        weights[i] += weights[j]
        alive[j] = False
        table[i], table[:, i] = added(i), added(i)
        table[j], table[:, j] = np.inf, np.inf
    return [ShapeClass(*shape) for shape in shapes[alive].tolist()]
