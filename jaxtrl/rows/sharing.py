"""Which samples share a prefix trie: those of one group always, others where sharing their prefix pays."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from .trie import Sequences, Trie, build_trie

# One more block visit costs about as much as the linear layers of so many tokens: 6.0 by counted FLOPs at hidden size
# 512, 4.8 in Qwen3-0.6B, 1.5 in 1.7B. Attention is slower for its FLOPs; near 8.3 sharing took 1.02 of the time (CPU).
VISIT_TOKENS = 8


class Sharing(NamedTuple):
    """`number[i]` of the sample's tree, samples sorted by it and then by their tokens, and what each has in common with
    the one before it (0 in another tree)."""

    number: Int[np.ndarray, " n"]
    order: Int[np.ndarray, " n"]
    common: Int[np.ndarray, " n"]

    def select(
        self, sequences: Sequences, chosen: Int[np.ndarray, " n"], key: Int[np.ndarray, " n"]
    ) -> Int[np.ndarray, " n"]:
        """`common` for another order, `order[chosen]`: 0 where the key changes, and in another tree."""
        samples, common = self.order[chosen], np.zeros(len(chosen), np.int64)
        same = (key[1:] == key[:-1]) & (self.number[samples[1:]] == self.number[samples[:-1]])
        adjacent = chosen[1:] == chosen[:-1] + 1
        keep, compare = (np.flatnonzero(same & which) + 1 for which in (adjacent, ~adjacent))
        common[keep] = self.common[chosen[keep]]
        common[compare] = sequences.common(samples[compare - 1], samples[compare])
        return common


def sort_by_tree(sequences: Sequences, number: Int[np.ndarray, " n"] | None) -> Sharing:
    """Samples with one number share whatever they have in common (None: all)."""
    order = sequences.sort()
    number = np.zeros(len(order), np.int64) if number is None else number
    order = order[np.argsort(number[order], kind="stable")]
    common = np.zeros(len(order), np.int64)
    pairs = np.flatnonzero(number[order[1:]] == number[order[:-1]]) + 1
    common[pairs] = sequences.common(order[pairs - 1], order[pairs])
    return Sharing(number, order, common)


def decide_sharing(
    sequences: Sequences, group: Int[np.ndarray, " n"], min_shared: int | None, block_size: int
) -> Sharing:
    """Trees of samples: prefixes are shared from the root down where it pays, and inside groups."""
    everything = sort_by_tree(sequences, None)
    if not len(group):
        return everything
    order, length = everything.order, sequences.length[everything.order]
    trie = build_trie(length, everything.common)
    pays = _pays(trie, length, everything.common, min_shared, block_size)
    # A tree begins at each node of which no ancestor pays.
    root, parent, first = len(order), trie.parent.tolist(), trie.first.tolist()
    is_open = [False] * root + [True] + [False] * (len(parent) - root - 1)
    begins = np.zeros(root, np.bool_)
    for node, paying in zip(trie.bottom_up[::-1].tolist(), pays[trie.bottom_up[::-1]].tolist(), strict=True):
        if is_open[parent[node]]:
            begins[first[node]] = True
            is_open[node] = not paying
    number = np.empty(root, np.int64)
    number[order] = np.cumsum(begins) - 1
    number = _join_by_group(number, group)
    chosen = np.argsort(number[order], kind="stable")
    sharing = everything._replace(number=number)
    return Sharing(number, order[chosen], sharing.select(sequences, chosen, number[order[chosen]]))


def _pays(
    trie: Trie,
    length: Int[np.ndarray, " n"],
    common: Int[np.ndarray, " n"],
    min_shared: int | None,
    block_size: int,
) -> Bool[np.ndarray, " nodes"]:
    """Whether the tokens above a node are shared by what is below it.

    With k branches below a prefix of p tokens, sharing saves (k - 1) p tokens, and each block of k - 1 branches visits
    one more block of keys: in packed rows a part of the prefix stands in a block that the branch visits anyway.
    """
    if min_shared is not None:
        return trie.depth >= min_shared
    is_sample = np.arange(len(trie.depth)) < len(length)
    branches = np.bincount(trie.parent[trie.parent >= 0], minlength=len(trie.depth)) + is_sample
    end = np.cumsum(length - common)
    start = (end - length)[trie.first] + trie.depth  # of the first branch below, where it begins
    below = end[trie.last] - start
    return (branches <= 1) | (trie.depth * branches * block_size >= VISIT_TOKENS * below)


def _join_by_group(number: Int[np.ndarray, " n"], group: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    """The numbers of trees after joining trees that hold samples of one group."""
    groups, inverse = np.unique(group, return_inverse=True)
    if len(groups) == len(group):
        return number
    while True:  # each round gives a group the least number of its trees, and a tree the least of its groups
        least = np.full(len(groups), len(number))
        np.minimum.at(least, inverse, number)
        by_tree = np.full(len(number), len(number))
        np.minimum.at(by_tree, number, least[inverse])
        joined = by_tree[number]
        if (joined == number).all():
            return number
        number = joined
