"""Tree rows: samples with common prefixes as prefix tries, each shared token once (DESIGN.md sections 1 and 4).

`plan_trees` decides which samples share and which go into one row; `tree_rows` builds the rows. Samples of one group
share whatever they have in common. Across groups a prefix is shared where it pays: each saved token saves its linear
work, but every block of tokens below the prefix has to visit one more block of keys.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from .batch import Row, Sample, check_samples, pad_visible, term_columns
from .blocks import DEFAULT_BLOCK_SIZE, needed_blocks
from .needs import Needs
from .pack import pack_indices, packed_lanes
from .placement import UNLIMITED, place, weigh
from .sharing import Sharing, decide_sharing, sort_by_tree
from .trie import Layout, Sequences, build_trie, lay_out, pre_order


class RowCosts(NamedTuple):
    """What rows cost: tokens through the linear layers, (query, key) pairs and visited block pairs of attention, head
    slots. `train.flops` makes FLOPs of tokens, pairs and slots."""

    rows: int
    tokens: int
    pairs: int
    blocks: int
    slots: int

    def kv_bytes(self, bytes_per_token: int) -> int:
        """Keys and values of all rows: `bytes_per_token` is 2 * layers * K/V heads * head_dim * bytes of the dtype."""
        return self.tokens * bytes_per_token


class TreePlan(NamedTuple):
    """Which samples make which tree row, and what it costs against packed rows of the same samples.

    `rows[r]`: the samples of a row, ascending. `share[i]`: samples with the same number share what they have in common.
    `group_raw`, `group_unique`: the tokens of each group
    of `groups`, one by one and as a trie of its own.
    """

    rows: list[list[int]]
    share: Int[np.ndarray, " samples"]
    dropped: list[int]  # samples longer than a row, under too_long="drop"
    split_groups: int  # groups that are spread over several rows
    repeated_tokens: int  # tokens that stand in more than one row because their tree does not fit into one
    raw_tokens: int
    unique_tokens: int
    groups: Int[np.ndarray, " groups"]
    group_raw: Int[np.ndarray, " groups"]
    group_unique: Int[np.ndarray, " groups"]
    needs: Needs
    tree: RowCosts
    packed: RowCosts

    @property
    def ratio(self) -> float:
        """Raw tokens for each token that is computed."""
        return self.raw_tokens / max(self.unique_tokens, 1)


def tree_rows(
    samples: Sequence[Sample],
    token_budget: int | None = None,
    *,
    min_shared_tokens: int | None = None,
    too_long: str = "error",
    max_slots: int | None = None,
    max_terms: int | None = None,
    block_size: int = DEFAULT_BLOCK_SIZE,
) -> list[Row]:
    """Tree rows of at most `token_budget` distinct tokens; see `plan_trees` for the arguments and what raises.

    `term_sample` numbers the samples of a row in the order in which they were given. Where nothing is shared a row is
    `concat_rows` of its samples.
    """
    limits = Limits(token_budget, max_slots, max_terms)
    kept = limits.check(samples, too_long, min_shared_tokens)
    chosen = [samples[i] for i in kept.tolist()]
    return _build_rows(chosen, _plan(chosen, limits, min_shared_tokens, block_size))


def tree_row(samples: Sequence[Sample], share: Int[np.ndarray, " samples"] | None = None) -> Row:
    """One tree row of all `samples`; only those with the same number in `share` (default: all) share tokens."""
    check_samples(samples)
    sequences = Sequences.join([sample.input_ids for sample in samples])
    sharing = sort_by_tree(sequences, share)
    forest = _forest(sequences, _Terms.of(sequences, samples), [np.arange(len(samples))], sharing)
    return _build_rows(samples, forest)[0]


def plan_trees(
    samples: Sequence[Sample],
    token_budget: int | None = None,
    *,
    min_shared_tokens: int | None = None,
    too_long: str = "error",
    max_slots: int | None = None,
    max_terms: int | None = None,
    block_size: int = DEFAULT_BLOCK_SIZE,
) -> TreePlan:
    """Plans tree rows from the samples' ids, loss masks and groups. Deterministic.

    Args:
        token_budget: distinct tokens of a row at most; None puts all samples into one row.
        min_shared_tokens: a prefix is shared across groups from this length on; None: where it pays.
        too_long: "error", or "drop" what does not fit into a row alone.
        max_slots, max_terms: slots and terms of a row at most (with a budget only).
        block_size: of attention.

    Raises:
        ValueError: arrays of unequal length, a sample that no row holds (named by its index), limits below 1.
    """
    limits = Limits(token_budget, max_slots, max_terms)
    kept = limits.check(samples, too_long, min_shared_tokens)
    chosen = [samples[i] for i in kept.tolist()]
    forest = _plan(chosen, limits, min_shared_tokens, block_size)
    share = np.full(len(samples), -1)
    share[kept] = forest.sharing.number
    needs, tree = _needs(forest, block_size)
    length = forest.sequences.length
    group = np.array([sample.group for sample in chosen], dtype=np.int64)
    return TreePlan(
        rows=[kept[row].tolist() for row in np.split(forest.numbers, forest.row_ends)[:-1]],
        share=share,
        dropped=np.setdiff1d(np.arange(len(samples)), kept).tolist(),
        raw_tokens=int(length.sum()),
        unique_tokens=tree.tokens,
        repeated_tokens=tree.tokens - int((length[forest.sharing.order] - forest.sharing.common).sum()),
        **_count_groups(forest, group),
        needs=needs,
        tree=tree,
        packed=_packed_costs(length, len(forest.terms), token_budget, block_size),
    )


class Limits(NamedTuple):
    """What a row holds at most; None is no limit."""

    tokens: int | None
    slots: int | None
    terms: int | None

    @property
    def room(self) -> tuple[int, ...]:
        return tuple(UNLIMITED if limit is None else limit for limit in self)

    def check(
        self, samples: Sequence[Sample], too_long: str, min_shared_tokens: int | None
    ) -> Int[np.ndarray, " kept"]:
        """The samples that fit into a row alone; raises ValueError (see `plan_trees`)."""
        names = ("token_budget", "max_slots", "max_terms", "min_shared_tokens")
        for name, value in zip(names, (*self, min_shared_tokens), strict=True):
            if value is not None and value < 1:
                raise ValueError(f"tree rows: {name} is {value}, it must be at least 1")
        if self.tokens is None and self != (None, None, None):
            raise ValueError("tree rows: max_slots and max_terms need a token_budget, without one there is one row")
        if too_long not in ("error", "drop"):
            raise ValueError(f"tree rows: too_long is {too_long!r}, give 'error' or 'drop'")
        tokens = check_samples(samples)
        trained = np.array([np.count_nonzero(sample.loss_mask[1:]) for sample in samples], dtype=np.int64)
        needs = np.stack([tokens, trained, trained], axis=1)
        fits = (needs <= self.room).all(axis=1)
        if too_long == "error" and not fits.all():
            sample = int(fits.argmin())
            which = int((needs[sample] > self.room).argmax())
            raise ValueError(
                f"sample {sample} has {needs[sample, which]} {'trained ' if which else ''}tokens, more than a tree row "
                f"holds ({names[which]}={self[which]}): cut it, raise the limit, or drop it (too_long='drop')"
            )
        return np.flatnonzero(fits)


class _Forest(NamedTuple):
    """Rows as one forest. A sample's rank is its place in all rows one after another."""

    sequences: Sequences
    sharing: Sharing
    numbers: Int[np.ndarray, " n"]  # by rank: which sample
    row_ends: Int[np.ndarray, " rows"]  # ranks
    terms: Int[np.ndarray, " t"]  # by rank: where the trained tokens are in `sequences.tokens`
    owner: Int[np.ndarray, " t"]  # their ranks
    order: Int[np.ndarray, " n"]  # ranks in pre-order
    common: Int[np.ndarray, " n"]  # what each has in common with the one before it in pre-order
    layout: Layout  # asked: `terms`
    used: Bool[np.ndarray, " m"]  # a token that some sample trains: it makes a slot
    token_ends: Int[np.ndarray, " rows"]


def _plan(samples: Sequence[Sample], limits: Limits, min_shared: int | None, block_size: int) -> _Forest:
    """The rows of samples that all fit."""
    sequences = Sequences.join([sample.input_ids for sample in samples])
    terms = _Terms.of(sequences, samples)
    group = np.array([sample.group for sample in samples], dtype=np.int64)
    sharing = decide_sharing(sequences, group, min_shared, block_size)
    rows = [np.arange(len(samples))] if samples else []
    if limits.tokens is not None and samples:
        rows = _place(sequences, terms, group, sharing, limits)
    return _forest(sequences, terms, rows, sharing)


class _Terms(NamedTuple):
    """The trained tokens of all samples: where they are, and which of them are a sample's (`first[i]`, `counts[i]`)."""

    token: Int[np.ndarray, " t"]
    first: Int[np.ndarray, " n"]
    counts: Int[np.ndarray, " n"]

    @classmethod
    def of(cls, sequences: Sequences, samples: Sequence[Sample]) -> "_Terms":
        masks = [sample.loss_mask for sample in samples]
        trained = np.concatenate(masks, dtype=np.bool_, casting="unsafe") if masks else np.zeros(0, np.bool_)
        trained[sequences.start[sequences.length > 0]] = False  # nothing predicts these
        token = np.flatnonzero(trained)
        first, end = (np.searchsorted(token, sequences.start + more) for more in (0, sequences.length))
        return cls(token, first, end - first)

    def ordered(self, numbers: Int[np.ndarray, " n"]) -> tuple[Int[np.ndarray, " t"], Int[np.ndarray, " t"]]:
        """The tokens sample by sample in this order, and the place of their sample in it."""
        count = self.counts[numbers]
        shift = self.first[numbers] - (np.cumsum(count) - count)
        owner = np.repeat(np.arange(len(numbers)), count)
        return self.token[np.arange(len(owner)) + shift[owner]], owner


def _place(
    sequences: Sequences,
    terms: _Terms,
    group: Int[np.ndarray, " n"],
    sharing: Sharing,
    limits: Limits,
) -> list[Int[np.ndarray, " _"]]:
    """The samples of each row, ascending; rows in the order of their first samples."""
    order, common = sharing.order, sharing.common
    length = sequences.length[order]
    trie = build_trie(length, common)
    own_terms, slots = terms.counts[order], np.zeros(0, np.int64)
    if limits.slots is not None:
        token, owner = terms.ordered(order)
        slots = lay_out(length, common, owner, token - sequences.start[order][owner]).asked
    rows = place(trie, weigh(trie, length, common, own_terms, slots), own_terms, group[order], limits.room)
    return sorted((np.sort(order[row]) for row in rows), key=lambda row: int(row[0]))


def _forest(sequences: Sequences, terms: _Terms, rows: list[Int[np.ndarray, " _"]], sharing: Sharing) -> _Forest:
    numbers = np.concatenate([np.zeros(0, np.int64), *rows])
    sizes = np.array([len(row) for row in rows], dtype=np.int64)
    row = np.repeat(np.arange(len(rows)), sizes)  # by rank
    position = np.empty(len(numbers), np.int64)
    position[sharing.order] = np.arange(len(numbers))
    by_row = np.lexsort((position[numbers], row))  # ranks, each row in the order of `sharing`
    common = sharing.select(sequences, position[numbers[by_row]], row[by_row])
    order, shared = pre_order(build_trie(sequences.length[numbers[by_row]], common), by_row)
    order = by_row[order]
    token, owner = terms.ordered(numbers)
    place = np.empty(len(numbers), np.int64)
    place[order] = np.arange(len(numbers))
    length = sequences.length[numbers[order]]
    layout = lay_out(length, shared, place[owner], token - sequences.start[numbers][owner])
    used = np.zeros(len(layout.parent), np.bool_)
    used[layout.asked] = True
    row_ends = np.cumsum(sizes)
    token_ends = np.cumsum(length - shared)[row_ends - 1] if len(numbers) else np.zeros(len(rows), np.int64)
    return _Forest(sequences, sharing, numbers, row_ends, token, owner, order, shared, layout, used, token_ends)


def _build_rows(samples: Sequence[Sample], forest: _Forest) -> list[Row]:
    sequences, layout = forest.sequences, forest.layout
    source = sequences.start[forest.numbers[forest.order]] + forest.common
    own = sequences.length[forest.numbers[forest.order]] - forest.common
    input_ids = sequences.tokens[np.repeat(source - layout.begin, own) + np.arange(len(forest.used))]
    slot = np.flatnonzero(forest.used)
    term_slot = (np.cumsum(forest.used) - 1)[layout.asked]
    columns = term_columns(samples, forest.terms, forest.numbers[forest.owner])
    slot_ends, term_ends = np.searchsorted(slot, forest.token_ends), np.searchsorted(forest.owner, forest.row_ends)
    ends = np.stack([forest.row_ends, forest.token_ends, slot_ends, term_ends], axis=1)
    bounds = np.concatenate([np.zeros((1, 4), np.int64), ends]).tolist()
    rows = []
    for (rank, low, slot_low, term_low), (_, high, slot_high, term_high) in pairwise(bounds):
        tokens, slots, terms = slice(low, high), slice(slot_low, slot_high), slice(term_low, term_high)
        rows.append(
            Row(
                input_ids=input_ids[tokens],
                position_ids=layout.position_ids[tokens].astype(np.int32),
                visible_until=(layout.visible_until[tokens] - low).astype(np.int32),
                slot_index=(layout.parent[slot[slots]] - low).astype(np.int32),
                slot_target=input_ids[slot[slots]],
                term_slot=(term_slot[terms] - slot_low).astype(np.int32),
                term_sample=(forest.owner[terms] - rank).astype(np.int32),
                weight=np.ones(term_high - term_low, np.float32),
                denominator=float(term_high - term_low),
                **{name: column if column is None else column[terms] for name, column in columns.items()},
            )
        )
    return rows


# Counts


def _needs(forest: _Forest, block_size: int) -> tuple[Needs, RowCosts]:
    """What each row needs of a shape class, and what all rows cost."""
    bounds = np.append(0, forest.token_ends)
    tokens = np.diff(bounds)
    slots, starts = (
        np.diff(np.append(0, np.cumsum(flags))[bounds]) for flags in (forest.used, forest.layout.position_ids == 0)
    )
    terms = np.diff(np.searchsorted(forest.owner, forest.row_ends), prepend=0)
    blocks = np.maximum(-(-tokens // block_size), 1)
    visited = [
        needed_blocks(pad_visible(forest.layout.visible_until[low : low + n] - low, size * block_size), block_size)
        for low, n, size in zip(bounds.tolist(), tokens.tolist(), blocks.tolist(), strict=False)
    ]
    needs = Needs(tokens, slots, terms, np.array(visited, np.int64) - blocks, starts)
    pairs = int((forest.layout.position_ids + 1).sum())
    return needs, RowCosts(len(tokens), int(tokens.sum()), pairs, sum(visited), int(slots.sum()))


def _packed_costs(length: Int[np.ndarray, " n"], terms: int, token_budget: int | None, block_size: int) -> RowCosts:
    """Best-fit packed rows of the same samples (one row where there is no budget)."""
    room = max(int(length.sum()), 1) if token_budget is None else token_budget
    packs = [[(i, 0, n) for i, n in enumerate(length.tolist())]] if token_budget is None else pack_indices(length, room)
    blocks = sum(-(-sum(stop for _, _, stop in pack) // block_size) for pack in packs)
    lanes = int(packed_lanes(packs, room, block_size).sum())
    pairs = int((length * (length + 1) // 2).sum())
    return RowCosts(len(packs), int(length.sum()), pairs, blocks + lanes, terms)


def _count_groups(forest: _Forest, group: Int[np.ndarray, " n"]) -> dict[str, Any]:
    """What `TreePlan` says about groups."""
    sequences, sharing = forest.sequences, forest.sharing
    groups, index = np.unique(group, return_inverse=True)
    chosen = np.argsort(index[sharing.order], kind="stable")
    samples = sharing.order[chosen]
    unique = sequences.length[samples] - sharing.select(sequences, chosen, index[samples])
    row = np.repeat(np.arange(len(forest.row_ends)), np.diff(forest.row_ends, prepend=0))
    pairs = np.unique(np.stack([index[forest.numbers], row]), axis=1)
    return {
        "groups": groups,
        "group_raw": np.bincount(index, sequences.length, len(groups)).astype(np.int64),
        "group_unique": np.bincount(index[samples], unique, len(groups)).astype(np.int64),
        "split_groups": int(np.count_nonzero(np.bincount(pairs[0], minlength=len(groups)) > 1)),
    }
