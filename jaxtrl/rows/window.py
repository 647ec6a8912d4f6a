"""Batches formed within a window of an epoch's order, so that they fall on few classes with little padding.

Only the order of the lines changes: it stays a permutation of the epoch that depends on the order and the lengths
alone, so any position in it can be taken up again.
"""

import heapq
from collections.abc import Callable

import numpy as np
from jaxtyping import Int

TRIALS = 8  # mixes of two classes that are tried for each window


def window_order(
    order: Int[np.ndarray, " n"],
    tokens: Int[np.ndarray, " lines"],
    per_device: int,
    devices: int,
    window: int,
    token_class: Callable[[int], int] | None,
) -> Int[np.ndarray, " n"]:
    """`order` with the lines of every `window` micro-batches (of `devices` rows of `per_device` lines) dealt out anew.

    `tokens` are those of each line, `token_class` gives the padded length of a row (None: rows as equal as possible).
    Micro-batches stand in the order of their first lines. What is left of the epoch behind its last whole micro-batch
    stays as it is.
    """
    lines = per_device * devices
    whole = len(order) // lines * lines
    parts = [
        _deal(order[start : min(start + window * lines, whole)], tokens, per_device, devices, token_class)
        for start in range(0, whole, window * lines)
    ]
    return np.concatenate([*parts, order[whole:]]).astype(np.int64)


def _deal(
    order: Int[np.ndarray, " n"],
    tokens: Int[np.ndarray, " lines"],
    per_device: int,
    devices: int,
    token_class: Callable[[int], int] | None,
) -> Int[np.ndarray, " n"]:
    """The lines of one window: of several ways to deal them out the first that pads to the fewest tokens."""
    lengths = tokens[order]
    rows = len(order) // per_device
    descending = np.argsort(-lengths, kind="stable").tolist()
    best: tuple[float, list[list[int]]] | None = None
    for targets in _targets(int(lengths.sum()), rows, token_class):
        dealt = _fill(descending, lengths.tolist(), targets, per_device)
        totals = [int(lengths[members].sum()) for members in dealt]
        dealt = [dealt[i] for i in sorted(range(rows), key=lambda i: (-totals[i], i))]
        totals.sort(reverse=True)  # rows of a micro-batch are padded to the largest of them
        padded = float(sum(map(token_class, totals[::devices]))) if token_class else 0.0
        if best is None or padded < best[0]:
            best = padded, dealt
    assert best is not None
    groups = [sorted(map(sorted, best[1][i : i + devices])) for i in range(0, rows, devices)]
    return order[np.array([line for group in sorted(groups) for row in group for line in row], np.int64)]


def _targets(total: int, rows: int, token_class: Callable[[int], int] | None) -> list[list[float]]:
    """Row lengths to aim at: all equal, or as many rows as possible full to one class and the others to the next.

    Rows seldom fill a class to the last token, so mixes with fewer rows of the smaller class are tried too.
    """
    mean = total / rows
    equal = [[mean] * rows]
    if token_class is None:
        return equal
    large = token_class(-(-total // rows))
    low, high = 0, -(-total // rows)
    while low < high:  # the least length of that class
        middle = (low + high) // 2
        low, high = (low, middle) if token_class(middle) == large else (middle + 1, high)
    if low == 0:
        return equal
    small = token_class(low - 1)
    most = min(rows, (rows * large - total) // (large - small))
    numbers = sorted({most - most * trial // TRIALS for trial in range(TRIALS)}, reverse=True)
    return equal + [[float(small)] * number + [float(large)] * (rows - number) for number in numbers]


def _fill(descending: list[int], lengths: list[int], targets: list[float], per_row: int) -> list[list[int]]:
    """Longest line first, each to the row that has the most space left, until a row has `per_row` lines."""
    space = [(-target, row) for row, target in enumerate(targets)]
    heapq.heapify(space)
    rows: list[list[int]] = [[] for _ in targets]
    for line in descending:
        left, row = space[0]
        rows[row].append(line)
        if len(rows[row]) == per_row:
            heapq.heappop(space)
        else:
            heapq.heapreplace(space, (left + lengths[line], row))
    return rows
