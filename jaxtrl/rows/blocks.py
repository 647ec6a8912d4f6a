"""Which blocks of a token row have to meet in attention: the tables that the device program walks through.

A row of `N` tokens is cut into blocks of `block_size`. Token `j` is seen by the tokens `i` with
`j <= i < visible_until[j]` (DESIGN.md section 1), so query block `a` has to meet key block `b <= a` exactly when some
token of `b` is still visible at the first token of `a`. Every block meets itself; the other pairs are listed here, one
**lane** each, in the order of the query blocks.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int

DEFAULT_BLOCK_SIZE = 128
# Scores per second relative to blocks of 128, by backend: where there is no figure, nothing else was measured. On a CPU
# with 2 cores the small products of a pair of 128-token blocks keep one core busy (8/4 heads of 64, float32:
# scripts/bench_attention.py --documents 16 --block_size 128, then 256).
SPEED = {"cpu": {128: 1.0, 256: 1.66}}


class BlockTables(NamedTuple):
    """The block pairs of one row (every field has a leading axis of devices in a batch). All int32.

    Lane `l < query_lanes.sum()` lets query block `lane_query[l]` see key block `lane_key[l] < lane_query[l]`. Later
    lanes are padding, masked by that count, whatever they hold. The shapes depend on (N, block size, lanes) only.
    """

    lane_query: Int[np.ndarray, "*devices lanes"]
    lane_key: Int[np.ndarray, "*devices lanes"]
    query_lanes: Int[np.ndarray, "*devices blocks"]  # number of lanes of each query block


class CountedTables(BlockTables):
    """The same tables for a device that may end a loop early: there padding lanes cost nothing.

    For CPUs. Neuron has no loop with a computed end, and a GPU would ask the host after every step.
    """


def choose_block_size(lengths: Int[np.ndarray, "n"], row_length: int, backend: str) -> int:
    """The block size, a divisor of `row_length`, under which attention over documents of these lengths is fastest.

    A document that starts anywhere in a packed row reaches over n / B + 1 blocks; large blocks are faster per score but
    compute more of them that nothing sees. `DEFAULT_BLOCK_SIZE` where the backend was not measured, for short documents
    and where it alone divides.
    """

    def seconds(size: int, speed: float) -> float:
        blocks = lengths / size + 1
        return float((blocks * (blocks + 1)).sum()) * size**2 / speed

    speeds = {size: speed for size, speed in SPEED.get(backend, {}).items() if row_length % size == 0}
    return min(speeds, key=lambda size: seconds(size, speeds[size]), default=DEFAULT_BLOCK_SIZE)


def _last_query_block(visible_until: Int[np.ndarray, "n"], block_size: int) -> Int[np.ndarray, "blocks"]:
    """The last query block that sees anything of each key block; raises ValueError on a row that is not valid."""
    n = visible_until.size
    if n == 0 or n % block_size:
        raise ValueError(f"visible_until has {n} entries: pad the row to a multiple of {block_size}, the block size")
    index = np.arange(n)
    bad = np.flatnonzero((visible_until <= index) | (visible_until > n))
    if bad.size:
        j = int(bad[0])
        raise ValueError(f"visible_until[{j}] is {visible_until[j]}: it must lie in {j + 1}..{n} (a token sees itself)")
    return (visible_until.reshape(-1, block_size).max(axis=1) - 1) // block_size


def count_lanes(visible_until: Int[np.ndarray, "n"], block_size: int = DEFAULT_BLOCK_SIZE) -> int:
    """The least number of lanes that holds the row's block pairs; at least 1, so that no table is empty."""
    last = _last_query_block(visible_until, block_size)
    return max(1, int((last - np.arange(last.size)).sum()))


def block_tables(
    visible_until: Int[np.ndarray, "n"], block_size: int = DEFAULT_BLOCK_SIZE, lanes: int | None = None
) -> BlockTables:
    """The tables of a row, padded to `lanes` (default: as many as it needs).

    Raises ValueError if N is not a multiple of `block_size`, if an entry of `visible_until` lies outside its row, or if
    the row needs more than `lanes`.
    """
    last = _last_query_block(visible_until, block_size)
    key = np.arange(last.size)
    seen_by = last - key  # key block b is seen by the query blocks b + 1 .. last[b]
    total = int(seen_by.sum())
    lanes = max(1, total) if lanes is None else lanes
    if total > lanes:
        raise ValueError(f"the row needs {total} attention lanes but its shape class has {lanes}: take a larger class")
    start = np.cumsum(seen_by) - seen_by
    lane_key = np.repeat(key, seen_by)
    lane_query = lane_key + 1 + np.arange(total) - np.repeat(start, seen_by)
    order = np.argsort(lane_query, kind="stable")
    tables = np.zeros((2, lanes), np.int32)
    tables[0, :total] = lane_query[order]
    tables[1, :total] = lane_key[order]
    query_lanes = np.bincount(lane_query, minlength=last.size).astype(np.int32)
    return BlockTables(tables[0], tables[1], query_lanes)


def visited_blocks(tables: BlockTables) -> int:
    """Block pairs that the device computes (all devices): the diagonal and the lanes, with padding unless counted."""
    lanes = tables.query_lanes.sum() if isinstance(tables, CountedTables) else tables.lane_query.size
    return int(lanes + tables.query_lanes.size)


def needed_blocks(visible_until: Int[np.ndarray, "n"], block_size: int = DEFAULT_BLOCK_SIZE) -> int:
    """Block pairs that hold at least one visible (query, key) pair of tokens."""
    last = _last_query_block(visible_until, block_size)
    return int((last - np.arange(last.size) + 1).sum())
