"""The shape set: its sizes, that classes hold their batches, few classes and little waste on real chats, refusals."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from jaxtrl.rows.batch import Row, Sample, ShapeClass, concat_rows, make_batch, pad_visible
from jaxtrl.rows.blocks import count_lanes
from jaxtrl.rows.ladder import ShapeSet
from jaxtrl.rows.needs import Needs, flat_needs

SETTINGS = ("auto", "none", 8, 100, "256", "fixed:512", "optimal:4")


def sample(length: int, trained: int | None = None) -> Sample:
    """A sample whose last `trained` tokens (default: all) are trained."""
    return Sample(np.arange(length), np.arange(length) >= length - (length if trained is None else trained))


def row(*lengths: int):
    return concat_rows([sample(n) for n in lengths])


rows_of_devices = st.lists(
    st.lists(st.tuples(st.integers(0, 80), st.integers(0, 80)), max_size=6), min_size=1, max_size=3
)


def build(drawn: list[list[tuple[int, int]]]) -> list[Row]:
    """For each device a row of samples (length, trained tokens)."""
    return [concat_rows([sample(n, min(n, trained)) for n, trained in device]) for device in drawn]


@given(rows_of_devices, st.sampled_from(SETTINGS), st.sampled_from([16, 128]))
def test_a_class_holds_its_batch(drawn, setting, block_size):
    rows = build(drawn)
    shape = ShapeSet.from_setting(setting, block_size).classify(rows)
    assert shape.tokens % block_size == 0
    assert shape.terms >= shape.slots >= 1
    batch = make_batch(rows, shape, block_size)  # raises when something does not fit
    assert batch.input_ids.shape == (len(rows), shape.tokens)


@given(rows_of_devices, st.sampled_from(SETTINGS))
def test_supervised_rows_have_as_many_terms_as_slots(drawn, setting):
    shape = ShapeSet.from_setting(setting, 16).classify(build(drawn))
    assert shape.terms == shape.slots


@given(rows_of_devices, st.sampled_from(SETTINGS))
def test_classes_round_up_the_largest_row(drawn, setting):
    """A batch needs what its rows need one by one: the class is the same whichever device has which row."""
    rows = build(drawn)
    shape_set = ShapeSet.from_setting(setting, 16)
    shape = shape_set.classify(rows)
    assert shape == shape_set.classify(rows[::-1])
    assert shape.tokens == max(shape_set.classify([one]).tokens for one in rows)


def test_auto_tokens_have_two_significant_bits():
    shape_set = ShapeSet.from_setting("auto")
    sizes = sorted({shape_set.token_class(n) for n in range(1, 6145)})
    assert sizes == [128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144]
    assert all(shape_set.token_class(n) == n and shape_set.token_class(n + 1) > n for n in sizes)
    assert shape_set.token_class(0) == 128
    assert ShapeSet.from_setting("auto", 16).token_class(10) == 128


@pytest.mark.parametrize(
    ("setting", "block_size", "tokens", "expected"),
    [(64, 128, 65, 128), (256, 128, 257, 512), (100, 16, 101, 208), ("none", 128, 129, 256), ("none", 16, 1, 16)],
)
def test_multiples(setting, block_size, tokens, expected):
    assert ShapeSet.from_setting(setting, block_size).token_class(tokens) == expected


def test_none_is_exact():
    rows = [row(20, 30), row(10)]
    lanes = count_lanes(pad_visible(rows[0].visible_until, 64), 16)
    assert ShapeSet.from_setting("none", 16).classify(rows) == ShapeClass(64, 48, 48, lanes)


def test_fixed_is_one_class_whatever_comes():
    shape_set = ShapeSet.from_setting("fixed:64", 16)
    shapes = {shape_set.classify([rows]) for rows in (row(64), row(1), row(5, 7, 30), concat_rows([]))}
    assert shapes == {ShapeClass(64, 64, 64, 6)}


@given(st.lists(st.integers(2, 700), min_size=1, max_size=5))
def test_fully_trained_rows_have_a_slot_for_every_token(lengths):
    """Else "all tokens" would need two programs per token size."""
    assume(sum(lengths) > 64)
    for setting in ("auto", 128):
        shape = ShapeSet.from_setting(setting).classify([row(*lengths)])
        assert shape.slots == shape.tokens


def test_slots_follow_the_tokens_in_few_steps():
    shape_set = ShapeSet.from_setting("auto")
    slots = {shape_set.classify([concat_rows([sample(1000, trained)])]).slots for trained in range(1, 1001)}
    assert sorted(slots) == [96, 192, 384, 768, 1024]


def test_lanes_follow_the_blocks_in_few_steps():
    shape_set = ShapeSet.from_setting(1024, 16)
    lanes = {shape_set.classify([row(*[1024 // pieces] * pieces)]).lanes for pieces in (1, 2, 3, 4, 8, 16, 32, 64)}
    assert sorted(lanes) == [160, 320, 640, 1280, 2016]


def test_listed_classes_are_tried_from_the_smallest_and_then_the_rule():
    small, large = ShapeClass(32, 16, 16, 1), ShapeClass(64, 64, 64, 6)
    shape_set = ShapeSet("auto", 0, 16, (small, large))
    assert shape_set.classify([row(10)]) == small
    assert shape_set.classify([row(20)]) == large  # slots
    assert shape_set.classify([row(20), row(33)]) == large
    unforeseen = [row(10), row(65)]
    assert shape_set.classify(unforeseen) == ShapeSet.from_setting("auto", 16).classify(unforeseen)


run_batches = st.lists(st.tuples(st.integers(0, 300), st.floats(0, 1), st.integers(1, 6)), min_size=1, max_size=40)


def needs_of(drawn, block_size=16) -> Needs:
    """Batches of one row: total tokens in so many equal documents, of which a share is trained."""
    lengths = [np.full(pieces, total // pieces) for total, _, pieces in drawn]
    trained = [
        (np.maximum(part - 1, 0) * share).astype(int) for part, (_, share, _) in zip(lengths, drawn, strict=True)
    ]
    rows = np.repeat(np.arange(len(drawn)), [len(part) for part in lengths])
    return flat_needs(np.concatenate(lengths), np.concatenate(trained), rows, len(drawn), block_size)


def padded_tokens(shape_set, needs):
    return sum(shape_set.class_of(need).tokens for need in needs.each())


@given(run_batches, st.sampled_from(["auto", "none", 32, "optimal:3", "fixed:320"]), st.integers(1, 5))
def test_a_fitted_set_has_at_most_so_many_classes_and_holds_every_batch(drawn, setting, limit):
    needs = needs_of(drawn)
    shape_set = ShapeSet.from_setting(setting, 16).fit(needs, limit)
    used = {shape_set.class_of(need) for need in needs.each()}
    assert len(used) <= max(1, min(limit, 3) if setting == "optimal:3" else limit)
    for need in needs.each():
        assert all(size <= held for size, held in zip(need, shape_set.class_of(need), strict=False))
    assert used <= set(shape_set.classes) or not shape_set.classes
    order = np.random.default_rng(0).permutation(len(drawn))
    assert ShapeSet.from_setting(setting, 16).fit(Needs(*(field[order] for field in needs)), limit) == shape_set
    assert ShapeSet.from_json(json.loads(json.dumps(shape_set.to_json()))) == shape_set


@given(run_batches)
def test_merging_never_makes_a_batch_smaller_and_auto_is_left_alone_where_it_is_few(drawn):
    needs = needs_of(drawn)
    by_rule = ShapeSet.from_setting("auto", 16)
    assert by_rule.fit(needs, 1000) == by_rule
    few, fewer = by_rule.fit(needs, 3), by_rule.fit(needs, 2)
    assert padded_tokens(by_rule, needs) <= padded_tokens(few, needs) <= padded_tokens(fewer, needs)
    assert len({by_rule.fit(needs).class_of(need) for need in needs.each()}) <= 12


def test_fixed_takes_the_slots_and_lanes_of_the_run():
    needs = needs_of([(300, 0.1, 6), (200, 0.2, 4)])
    (shape,) = ShapeSet.from_setting("fixed:512", 16).fit(needs).classes
    assert shape == ShapeClass(512, 48, 48, 80)
    with pytest.raises(ValueError, match="a row has 600 tokens but the shape is fixed at 512"):
        ShapeSet.from_setting("fixed:512", 16).fit(needs_of([(600, 1.0, 1)]))


def test_very_many_exact_classes_are_merged_from_those_of_auto():
    rng = np.random.default_rng(0)
    needs = needs_of([(int(n), 1.0, 2) for n in rng.integers(2, 8000, 3000)], 128)
    shape_set = ShapeSet.from_setting("none").fit(needs, 8)
    assert len(shape_set.classes) == 8
    assert padded_tokens(shape_set, needs) < 1.3 * needs.tokens.sum()


@pytest.mark.parametrize("setting", SETTINGS)
def test_json_round_trip(setting):
    shape_set = ShapeSet.from_setting(setting, 16)
    for one in (shape_set, replace(shape_set, classes=(ShapeClass(32, 16, 16, 1), ShapeClass(64, 64, 64, 6)))):
        again = ShapeSet.from_json(json.loads(json.dumps(one.to_json())))
        assert again == one
        assert isinstance(again.classify([row(5)]), ShapeClass)


@pytest.mark.parametrize(
    "setting", ["automatic", 0, -128, "fixed:", "fixed:-1", "fixed", "fixed:100", "optimal", "optimal:0", True, "1.5"]
)
def test_a_wrong_setting_is_refused(setting):
    with pytest.raises(ValueError, match=r"pad_to_multiple_of is"):
        ShapeSet.from_setting(setting)


def test_refusals_at_run_time():
    with pytest.raises(ValueError, match="a row has 513 tokens but the shape is fixed at 512"):
        ShapeSet.from_setting("fixed:512").classify([row(513)])
    with pytest.raises(ValueError, match="one row per device"):
        ShapeSet.from_setting("auto").classify([])
