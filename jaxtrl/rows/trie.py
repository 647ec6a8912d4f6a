"""Prefix tries over token sequences by whole-array operations: sort the sequences, compare neighbours, keep a stack.

Sorted lexicographically, sequences with a common prefix stand together, and how many tokens each has in common with the
one before it says everything about their trie: it is the depth at which the two part. No Python loop runs per token.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Integer

WINDOW = 16  # tokens that all pairs compare at once: most pairs of unrelated samples part within them

Spans = list[tuple[int, int]]


class Sequences(NamedTuple):
    """n token sequences in one array: sequence i is `tokens[start[i] : start[i] + length[i]]`."""

    tokens: Int[np.ndarray, " all"]
    start: Int[np.ndarray, " n"]
    length: Int[np.ndarray, " n"]

    @classmethod
    def join(cls, arrays: Sequence[Integer[np.ndarray, " _"]]) -> "Sequences":
        """From one array per sequence."""
        length = np.array([len(array) for array in arrays], dtype=np.int64)
        tokens = np.concatenate(arrays, dtype=np.int32, casting="unsafe") if len(arrays) else np.zeros(0, np.int32)
        return cls(tokens, np.cumsum(length) - length, length)

    def sort(self) -> Int[np.ndarray, " n"]:
        """The numbers of the sequences in lexicographic order, equal ones in the order of their numbers."""
        text = self.tokens.astype(">u4").tobytes()  # most significant byte first: bytes compare as tokens do
        begin, end = (4 * self.start).tolist(), (4 * (self.start + self.length)).tolist()
        keys = [text[a:b] for a, b in zip(begin, end, strict=True)]
        return np.array(sorted(range(len(keys)), key=keys.__getitem__), dtype=np.int64)

    def common(self, left: Int[np.ndarray, " p"], right: Int[np.ndarray, " p"]) -> Int[np.ndarray, " p"]:
        """The length of the common prefix of sequences `left[i]` and `right[i]`."""
        limit = np.minimum(self.length[left], self.length[right])
        a, b = self.start[left], self.start[right]
        window = np.arange(WINDOW)
        if len(self.tokens):
            last = len(self.tokens) - 1
            first_a, first_b = (self.tokens[np.minimum(s[:, None] + window, last)] for s in (a, b))
            part = (first_a != first_b) | (window >= limit[:, None])
        else:
            part = np.ones((len(limit), WINDOW), np.bool_)
        common = part.argmax(axis=1)
        undecided = np.flatnonzero(~part.any(axis=1))
        for pair, i, j, n in zip(
            *(x.tolist() for x in (undecided, a[undecided], b[undecided], limit[undecided])), strict=True
        ):
            differ = self.tokens[i : i + n] != self.tokens[j : j + n]
            at = int(differ.argmax())
            common[pair] = at if differ[at] else n
        return common


class Trie(NamedTuple):
    """The compact trie of n sequences in lexicographic order. All arrays are int64 over its nodes.

    Node i < n is where sequence i ends; the root is node n; later nodes are forks. The sequences at or below a node are
    `first[node]` to `last[node]` (included). `bottom_up` holds every node but the root, children before parents.
    """

    depth: Int[np.ndarray, " nodes"]
    parent: Int[np.ndarray, " nodes"]
    first: Int[np.ndarray, " nodes"]
    last: Int[np.ndarray, " nodes"]
    bottom_up: Int[np.ndarray, " nodes-1"]


def build_trie(length: Int[np.ndarray, " n"], common: Int[np.ndarray, " n"]) -> Trie:
    """From each sequence's length and what it has in common with the one before it (the first: 0).

    Where that is 0 a tree begins, whatever the tokens are.
    """
    root = len(length)
    depth, parent = [*length.tolist(), 0], [root] * root + [-1]
    first, last = [*range(root), 0], [*range(root), root - 1]
    alone = np.append(common[1:] == 0, True)[:root] & (common == 0)
    bottom_up = np.flatnonzero(alone).tolist()
    path = [root]  # the nodes from the root to the end of the last sequence
    leaves = np.flatnonzero(~alone)
    previous = 0
    for leaf, shared in zip(leaves.tolist(), common[leaves].tolist(), strict=True):
        top = path[-1]
        if not shared:
            while top != root:
                last[top] = previous
                bottom_up.append(path.pop())
                top = path[-1]
        else:
            below = root
            while depth[top] > shared:
                below = path.pop()
                last[below] = previous
                bottom_up.append(below)
                top = path[-1]
            if depth[top] < shared:
                parent[below] = len(depth)
                parent.append(top)
                top = len(depth)
                path.append(top)
                depth.append(shared)
                first.append(first[below])
                last.append(leaf)
        parent[leaf] = top
        path.append(leaf)
        previous = leaf
    for node in path[:0:-1]:
        last[node] = previous
        bottom_up.append(node)
    return Trie(*(np.array(x, dtype=np.int64) for x in (depth, parent, first, last, bottom_up)))


def pre_order(trie: Trie, rank: Int[np.ndarray, " n"]) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
    """Depth-first order in which siblings follow their least `rank` (one distinct number for each sequence).

    Returns the sequences in that order, and what each has in common with the one before it.
    """
    count = len(rank)
    key = [*rank.tolist(), -1] + [count] * (len(trie.depth) - count - 1)
    parent, depth = trie.parent.tolist(), trie.depth.tolist()
    for node in trie.bottom_up.tolist():
        key[parent[node]] = min(key[parent[node]], key[node])
    children: list[list[int]] = [[] for _ in key]
    for node in np.argsort(np.array(key), kind="stable")[::-1].tolist():
        if node != count:
            children[parent[node]].append(node)  # largest first: a stack gives them back smallest first
    order, common = [], []
    stack = [(node, 0) for node in children[count]]
    while stack:
        node, shared = stack.pop()
        below = children[node]
        if node < count:
            order.append(node)
            common.append(shared)
            shared = depth[node]
        if below:
            stack += [(child, depth[node]) for child in below[:-1]]
            stack.append((below[-1], shared))  # at a fork the first branch goes on where the stem came from
    return np.array(order, dtype=np.int64), np.array(common, dtype=np.int64)


class Layout(NamedTuple):
    """Distinct tokens of a forest in depth-first pre-order, m in all (int64 but for what a row takes as it is).

    `begin[i]`: where the own tokens of the i-th sequence (those not in common with an earlier one) begin.
    `parent[j]`: the token before token j on its path (of a first token: any). `asked[q]`: the token that is at the
    asked depth of the asked sequence.
    """

    begin: Int[np.ndarray, " n"]
    position_ids: Int[np.ndarray, " m"]
    visible_until: Int[np.ndarray, " m"]
    parent: Int[np.ndarray, " m"]
    asked: Int[np.ndarray, " q"]


def lay_out(
    length: Int[np.ndarray, " n"],
    common: Int[np.ndarray, " n"],
    who: Int[np.ndarray, " q"],
    where: Int[np.ndarray, " q"],
) -> Layout:
    """Places the tokens of sequences in depth-first order, and finds token `where[i]` of sequence `who[i]`."""
    own = length - common
    end = np.cumsum(own)
    begin, total = end - own, int(own.sum())
    tree = np.cumsum(common == 0) - 1
    tree_ends = np.append(begin[common == 0], total)[1:]
    position_ids = np.arange(total) - np.repeat(begin - common, own)
    visible_until = np.repeat(tree_ends[tree], own)
    parent = np.arange(total) - 1
    asked = begin[who] + where - common[who]
    shared = np.flatnonzero(where < common[who])  # these lie on the path of an earlier sequence
    shared = shared[np.argsort(who[shared], kind="stable")]
    bounds = np.searchsorted(who[shared], np.arange(len(length) + 1))
    pieces: list[tuple[int, int, int]] = []  # of the current path: first depth, end depth, place of its first token
    busy = np.flatnonzero((common > 0) | np.append(common[1:] > 0, False)[: len(common)])
    steps = zip(*(x[busy].tolist() for x in (common, length, begin, bounds[:-1], bounds[1:])), strict=True)
    for depth, until, place, ask, stop in steps:
        if not depth:
            pieces = [(0, until, place)]
            continue
        while pieces[-1][1] > depth:
            low, high, at = pieces.pop()
            cut = max(low, depth)
            visible_until[at + cut - low : at + high - low] = place
            if low < depth:
                pieces.append((low, depth, at))
        if ask < stop:
            lows, _, ats = np.array(pieces).T
            query = shared[ask:stop]
            piece = np.searchsorted(lows, where[query], side="right") - 1
            asked[query] = ats[piece] + where[query] - lows[piece]
        if until > depth:
            low, _, at = pieces[-1]
            parent[place] = at + depth - 1 - low
            pieces.append((depth, until, place))
    return Layout(begin, position_ids, visible_until, parent, asked)
