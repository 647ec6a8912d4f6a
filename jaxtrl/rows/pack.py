"""Packing: filling rows of a token budget with whole samples, or with fragments of them.

The strategies are TRL's: `bfd` (best-fit decreasing, samples longer than the budget are cut and the rest is lost),
`bfd_split` (the rest becomes samples of its own) and `wrapped` (the concatenation of all samples, cut every
`token_budget` tokens). Samples and fragments are isolated from each other in all three, and positions restart in each.
Unlike TRL, which packs its data in lots of 1,000 samples, the whole data set is packed at once.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Int, Integer

from .batch import Row, Sample, concat_rows
from .blocks import DEFAULT_BLOCK_SIZE

STRATEGIES = ("bfd", "bfd_split", "wrapped")
Fragment: TypeAlias = tuple[int, int, int]  # sample, first token, end token


def pack_rows(samples: Sequence[Sample], token_budget: int, strategy: str = "bfd") -> list[Row]:
    """Packs samples into rows of at most `token_budget` tokens; see `pack_indices` and `concat_rows`."""
    lengths = np.array([len(sample.input_ids) for sample in samples], dtype=np.int64)
    packs = pack_indices(lengths, token_budget, strategy)
    return [concat_rows([cut_sample(samples[i], start, stop) for i, start, stop in pack]) for pack in packs]


def cut_sample(sample: Sample, start: int, stop: int) -> Sample:
    """The tokens `start` to `stop` of a sample as a sample of its own: its first token is never predicted."""
    if start == 0 and stop == len(sample.input_ids):
        return sample
    arrays: dict[str, Any] = {n: v[start:stop] for n, v in sample._asdict().items() if isinstance(v, np.ndarray)}
    return sample._replace(**arrays)


def pack_indices(lengths: Integer[np.ndarray, " n"], token_budget: int, strategy: str = "bfd") -> list[list[Fragment]]:
    """For each packed row its fragments (sample, start, stop), from the samples' lengths alone. Deterministic.

    `bfd_split` and `wrapped` place every token once; `bfd` places the first `token_budget` tokens of each sample. Empty
    samples are in no row. Best-fit decreasing: "Fewer Truncations Improve Language Modeling",
    https://arxiv.org/abs/2404.10830. Raises ValueError for an unknown strategy or a budget below 1.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"packing_strategy is {strategy!r}: give one of {', '.join(STRATEGIES)}")
    if token_budget < 1:
        raise ValueError(f"the token budget of packed rows is {token_budget}: it must be at least 1 (max_length)")
    lengths = lengths.astype(np.int64)
    if strategy == "wrapped":
        return _wrap(lengths, token_budget)
    sample = np.flatnonzero(lengths > 0)
    if strategy == "bfd":
        start = np.zeros_like(sample)
    else:
        pieces = -(-lengths[sample] // token_budget)
        sample = np.repeat(sample, pieces)
        start = (np.arange(len(sample)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * token_budget
    stop = np.minimum(start + token_budget, lengths[sample])
    fragments = list(zip(sample.tolist(), start.tolist(), stop.tolist(), strict=True))
    return [[fragments[i] for i in members] for members in best_fit_decreasing(stop - start, token_budget)]


def packed_lanes(
    packs: Sequence[Sequence[Fragment]], token_budget: int, block_size: int = DEFAULT_BLOCK_SIZE
) -> Int[np.ndarray, " packs"]:
    """The attention lanes (`count_lanes`) that each packed row needs when it starts at the edge of a block.

    Rows of several packs, each filled up to the edge of a block, need the sum.
    """
    blocks = -(-token_budget // block_size)
    pack = np.repeat(np.arange(len(packs)), [len(fragments) for fragments in packs])
    sizes = np.array([stop - start for fragments in packs for _, start, stop in fragments], dtype=np.int64)
    used = np.bincount(pack, sizes, minlength=len(packs)).astype(np.int64)
    # All packs one after another, each as long as the budget: ends of their fragments, last token of each block.
    room = blocks * block_size
    ends = np.cumsum(sizes) + (np.arange(len(packs)) * room - (np.cumsum(used) - used))[pack]
    last_token = np.arange(len(packs) * blocks).reshape(-1, blocks) * block_size + block_size - 1
    seen_until = np.append(ends, 0)[np.searchsorted(ends, last_token, side="right")]
    in_pack = last_token < (np.arange(len(packs)) * room + used)[:, None]
    return np.where(in_pack, (seen_until - 1) // block_size - last_token // block_size, 0).sum(axis=1)


def best_fit_decreasing(sizes: Int[np.ndarray, " f"], budget: int) -> list[list[int]]:
    """Bins of indices: each size, largest first, goes where it leaves the least space (oldest such bin first).

    Bin contents are grouped by the space left; the set of spaces that occur is one Python integer used as a bit set, so
    that "the smallest space that fits" is a shift and a lowest bit.
    """
    bins: list[list[int]] = []
    with_space: dict[int, deque[list[int]]] = {}
    occurring = 0
    order = np.argsort(-sizes, kind="stable")
    for index, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        fitting = occurring >> size
        if fitting:
            space = size + (fitting & -fitting).bit_length() - 1
            waiting = with_space[space]
            members = waiting.popleft()
            if not waiting:
                occurring ^= 1 << space
        else:
            space, members = budget, []
            bins.append(members)
        members.append(index)
        left = space - size
        if left:
            with_space.setdefault(left, deque()).append(members)
            occurring |= 1 << left
    return bins


def _wrap(lengths: Int[np.ndarray, " n"], budget: int) -> list[list[Fragment]]:
    """Fragments of the concatenation of all samples, cut at the samples' ends and at every multiple of the budget."""
    ends = np.cumsum(lengths)
    total = int(lengths.sum())
    begins = ends - lengths
    starts = np.union1d(begins[lengths > 0], np.arange(0, total, budget))
    stops = np.append(starts[1:], total)[: len(starts)]
    sample = np.searchsorted(ends, starts, side="right")
    rows: list[list[Fragment]] = [[] for _ in range(-(-total // budget))]
    fragments = zip(sample.tolist(), (starts - begins[sample]).tolist(), (stops - begins[sample]).tolist(), strict=True)
    for row, fragment in zip((starts // budget).tolist(), fragments, strict=True):
        rows[row].append(fragment)
    return rows
