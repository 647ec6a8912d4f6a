"""Rows for attention tests: `visible_until` of causal, packed and tree rows, and strategies for random ones."""

import numpy as np
from hypothesis import strategies as st


def causal(n: int) -> np.ndarray:
    return np.full(n, n, np.int32)


def packed(lengths: list[int], n: int | None = None) -> np.ndarray:
    """Documents one after the other, then padding up to `n`."""
    ends = np.repeat(np.cumsum(lengths), lengths)
    padding = np.arange(len(ends), len(ends) if n is None else n) + 1
    return np.concatenate([ends, padding]).astype(np.int32)


def tree(depths: list[int]) -> np.ndarray:
    """A forest in pre-order: a token is seen until the next token that is no deeper."""
    n = len(depths)
    ends = [next((i for i in range(j + 1, n) if depths[i] <= depths[j]), n) for j in range(n)]
    return np.array(ends, np.int32)


@st.composite
def forests(draw, max_blocks: int, size: int, blocks: int | None = None) -> np.ndarray:
    """Random forests of `blocks` (or 1 to `max_blocks`) blocks: mostly chains, with forks to any depth and padding."""
    n = size * (blocks or draw(st.integers(1, max_blocks)))
    real = draw(st.integers(0, n))
    depths: list[int] = []
    for up in draw(st.lists(st.integers(-12, 12), min_size=real, max_size=real)):
        deepest = depths[-1] + 1 if depths else 0
        depths.append(max(0, deepest - max(0, up)))
    return tree(depths + [0] * (n - real))


@st.composite
def intervals(draw, max_blocks: int, size: int) -> np.ndarray:
    """Any `visible_until` at all, nested or not."""
    n = size * draw(st.integers(1, max_blocks))
    return np.array([draw(st.integers(j + 1, n)) for j in range(n)], np.int32)
