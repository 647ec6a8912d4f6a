"""Which sequences of a trie go into which row: best fit from the leaves up, so that what shares most stays together."""

import heapq
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from .pack import best_fit_decreasing
from .trie import Spans, Trie

UNLIMITED = 2**62


class Weights(NamedTuple):
    """What the nodes of a trie cost: columns tokens, slots, terms, (query, key) pairs.

    `whole`: the node's subtree from its parent on; `edge`: the tokens between parent and node alone.
    """

    whole: Int[np.ndarray, "nodes 4"]
    edge: Int[np.ndarray, "nodes 4"]


class Items(NamedTuple):
    """Things to place: their weights, and the sequences that each holds as (first, last) of the sorted order."""

    weights: Int[np.ndarray, "items 4"]
    spans: list[Spans]


def weigh(
    trie: Trie,
    length: Int[np.ndarray, " n"],
    common: Int[np.ndarray, " n"],
    own_terms: Int[np.ndarray, " n"],
    slot_tokens: Int[np.ndarray, " q"],
) -> Weights:
    """The weights of all nodes, from the sequences in sorted order (see `build_trie`).

    `slot_tokens`: places in the layout of the sequences in this order of the tokens that make a slot (repeats allowed).
    """
    end = np.cumsum(length - common)
    slots = np.zeros(int(end[-1]) + 1, np.int64)
    slots[slot_tokens + 1] = 1
    slots = np.cumsum(slots)
    pairs = np.cumsum(length * (length + 1) - common * (common + 1)) // 2
    terms = np.cumsum(own_terms)
    first, last = trie.first, trie.last
    subtree_terms = terms[last] - (terms - own_terms)[first]

    def from_depth(depth: Int[np.ndarray, " nodes"]) -> Int[np.ndarray, "nodes 4"]:
        """The subtree and the path that leads to it, without the path's first `depth` tokens."""
        at = (end - length)[first] + depth
        path_pairs = (length * (length + 1))[first] // 2 - depth * (depth + 1) // 2
        subtree_pairs = pairs[last] - pairs[first] + path_pairs
        return np.stack([end[last] - at, slots[end[last]] - slots[at], subtree_terms, subtree_pairs], axis=1)

    top = trie.depth[trie.parent]
    top[len(length)] = 0
    whole = from_depth(top)
    return Weights(whole, whole - from_depth(trie.depth))


def place(
    trie: Trie, weights: Weights, own_terms: Int[np.ndarray, " n"], group: Int[np.ndarray, " n"], room: tuple[int, ...]
) -> list[Int[np.ndarray, " _"]]:
    """The sequences (numbers in sorted order, ascending) of each row; no row exceeds `room` (tokens, slots, terms).

    A subtree that fits stays whole; one that does not becomes as few parts as best-fit decreasing makes, from the
    leaves up, each with the prefix. Sequences of one group stay together where they fit. Every single sequence has to
    fit.
    """
    root = len(own_terms)
    limit = np.array([*room, UNLIMITED])
    grouped = len(np.unique(group)) < len(group)
    children = _children(trie)
    # Nodes that do not fit, parents before children, with the weight of the path that ends there.
    split = [(root, np.zeros(4, np.int64))]
    for node, path in split:
        below = children(node)
        too_large = below[(path + weights.whole[below] > limit).any(axis=1)]
        split += [(child, path + weights.edge[child]) for child in too_large.tolist()]
    parts: dict[int, Items] = {}
    for node, path in reversed(split):
        left = limit - path
        items = _items_below(node, trie, weights, children(node), parts)
        if node < root:
            own = np.array([[0, 0, own_terms[node], 0]])
            items = Items(np.concatenate([items.weights, own]), [*items.spans, [(node, node)]])
        if grouped:
            items = _join_groups(items, group, left)
        bins = _fill(items.weights, left)
        if node == root:
            bins = _balanced(items.weights, left, len(bins), _largest_cost(items.weights, bins)) or bins
        parts[node] = _joined(items, bins)
    return [np.sort(_members(spans)) for spans in parts[root].spans]


def _children(trie: Trie) -> Callable[[int], np.ndarray]:
    """node -> its children."""
    order = np.argsort(trie.parent, kind="stable")
    parents = trie.parent[order]

    def children(node: int) -> Int[np.ndarray, " children"]:
        low, high = np.searchsorted(parents, [node, node + 1])
        return order[low:high]

    return children


def _items_below(
    node: int, trie: Trie, weights: Weights, below: Int[np.ndarray, " children"], parts: dict[int, Items]
) -> Items:
    """The children that fit as they are and the parts of the others, weighed from `node` on."""
    is_split = np.array([child in parts for child in below.tolist()], dtype=np.bool_)
    whole = below[~is_split]
    spans = [[span] for span in zip(trie.first[whole].tolist(), trie.last[whole].tolist(), strict=True)]
    loads = [weights.whole[whole]]
    for child in below[is_split].tolist():
        part = parts.pop(child)
        loads.append(part.weights + weights.edge[child])
        spans += part.spans
    return Items(np.concatenate(loads), spans)


def _members(spans: Spans) -> Int[np.ndarray, " n"]:
    return np.concatenate([np.arange(first, last + 1) for first, last in spans])


def _joined(items: Items, bins: list[list[int]]) -> Items:
    weights = [items.weights[members].sum(axis=0) for members in bins]
    spans = [[span for item in members for span in items.spans[item]] for members in bins]
    return Items(np.array(weights, dtype=np.int64).reshape(-1, 4), spans)


def _join_groups(items: Items, group: Int[np.ndarray, " n"], left: Int[np.ndarray, "4"]) -> Items:
    """Makes one item of those that hold samples of the same group, where it fits."""
    sequences = [_members(spans) for spans in items.spans]
    owner = np.repeat(np.arange(len(sequences)), [len(x) for x in sequences])
    group_of, item = np.unique(np.stack([group[np.concatenate(sequences)], owner]), axis=1)
    again = np.flatnonzero(group_of[1:] == group_of[:-1]) + 1
    head = list(range(len(sequences)))

    def find(i: int) -> int:
        while head[i] != i:
            head[i] = head[head[i]]
            i = head[i]
        return i

    load = items.weights.copy()
    for a, b in zip(item[again - 1].tolist(), item[again].tolist(), strict=True):
        low, high = sorted((find(a), find(b)))
        if low != high and (load[low] + load[high] <= left).all():
            head[high] = low
            load[low] += load[high]
    together: dict[int, list[int]] = {}
    for i in range(len(sequences)):
        together.setdefault(find(i), []).append(i)
    return _joined(items, list(together.values()))


def _fill(weights: Int[np.ndarray, "items 4"], left: Int[np.ndarray, "4"]) -> list[list[int]]:
    """Best-fit decreasing. An item's size is the largest share that it takes of any limit, so no limit is exceeded."""
    if (left < 0).any():  # what samples of other rows train on the path counts here too: nothing may be added
        return [[item] for item in range(len(weights))]
    limited = np.flatnonzero(left[:3] < UNLIMITED // 2)
    room = np.maximum(left[limited], 1)
    scale = int(room.max())
    size = np.minimum(-(-weights[:, limited] * scale // room), scale).max(axis=1)
    some = np.flatnonzero(size)
    bins = [some[members].tolist() for members in best_fit_decreasing(size[some], scale)]
    nothing = np.flatnonzero(size == 0).tolist()  # these take no room: prefixes of what is placed
    if not bins and nothing:
        return [nothing]
    if nothing:
        bins[0] += nothing
    return bins


def _largest_cost(weights: Int[np.ndarray, "items 4"], bins: list[list[int]]) -> int:
    return max((int(weights[members, 3].sum()) for members in bins), default=0)


def _balanced(
    weights: Int[np.ndarray, "items 4"], left: Int[np.ndarray, "4"], count: int, largest: int
) -> list[list[int]] | None:
    """The items in `count` rows of even attention cost: largest first, each where the cost is least and it fits.

    None if they do not fit that way, or if no row's cost falls below `largest`.
    """
    if count < 2 or 4 * (left[0] * count - weights[:, 0].sum()) < weights[:, 0].min() * count:
        return None  # rows this full (within a quarter of the smallest item) leave no choice
    bins: list[list[int]] = [[] for _ in range(count)]
    space = [left.tolist() for _ in range(count)]
    cheapest = [(0, number) for number in range(count)]
    tries = 8 * len(weights)
    loads = weights.tolist()
    for item in np.lexsort((-weights[:, 3], -weights[:, 0])).tolist():
        passed = []
        while cheapest and tries:
            tries -= 1
            cost, number = heapq.heappop(cheapest)
            if all(map(int.__le__, loads[item], space[number])):
                break
            passed.append((cost, number))
        else:
            return None
        bins[number].append(item)
        space[number] = [have - use for have, use in zip(space[number], loads[item], strict=True)]
        for entry in [*passed, (cost + loads[item][3], number)]:
            heapq.heappush(cheapest, entry)
    full = [members for members in bins if members]
    return full if _largest_cost(weights, full) < largest else None
