"""The shape set: its sizes, that classes hold their batches, few classes and little waste on real chats, refusals."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from jaxtrl.rows.batch import Row, Sample, ShapeClass, concat_rows, make_batch, pad_visible
from jaxtrl.rows.blocks import count_lanes
from jaxtrl.rows.ladder import ShapeSet
from jaxtrl.rows.order import epoch_order

SETTINGS = ("auto", "none", 8, 100, "256", "fixed:512")


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


def test_listed_classes_are_tried_from_the_smallest():
    small, large = ShapeClass(32, 16, 16, 1), ShapeClass(64, 64, 64, 6)
    shape_set = ShapeSet("auto", 0, 16, (small, large))
    assert shape_set.classify([row(10)]) == small
    assert shape_set.classify([row(20)]) == large  # slots
    assert shape_set.classify([row(20), row(33)]) == large
    with pytest.raises(
        ValueError, match=r"a batch needs ShapeClass\(tokens=80, .* largest shape of this run is .*start anew"
    ):
        shape_set.classify([row(10), row(65)])


@pytest.mark.parametrize("setting", SETTINGS)
def test_json_round_trip(setting):
    shape_set = ShapeSet.from_setting(setting, 16)
    for one in (shape_set, replace(shape_set, classes=(ShapeClass(32, 16, 16, 1), ShapeClass(64, 64, 64, 6)))):
        again = ShapeSet.from_json(json.loads(json.dumps(one.to_json())))
        assert again == one
        assert isinstance(again.classify([row(5)]), ShapeClass)


@pytest.mark.parametrize(
    "setting", ["automatic", 0, -128, "fixed:", "fixed:-1", "fixed", "fixed:100", "optimal", True, "1.5"]
)
def test_a_wrong_setting_is_refused(setting):
    with pytest.raises(ValueError, match=r"pad_to_multiple_of is"):
        ShapeSet.from_setting(setting)


def test_refusals_at_run_time():
    with pytest.raises(ValueError, match="a row has 513 tokens but the shape is fixed at 512"):
        ShapeSet.from_setting("fixed:512").classify([row(513)])
    with pytest.raises(ValueError, match="one row per device"):
        ShapeSet.from_setting("auto").classify([])


@pytest.fixture(scope="module")
def chat_samples(shared_data, qwen3_tokenizer) -> list[Sample]:
    samples = []
    for line in (shared_data / "jsonl" / "chat_multiturn.jsonl").read_text().splitlines():
        ids = qwen3_tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=True, return_dict=False)
        samples.append(sample(len(ids)))
    return samples


@pytest.mark.parametrize(("max_length", "programs", "padding", "visits"), [(512, 4, 0.17, 1.4), (None, 12, 0.19, 1.35)])
def test_real_chats_need_few_programs(chat_samples, max_length, programs, padding, visits):
    """Issue 4: at most 12 programs in 500 steps of batch 4, 20 % padding, 1.6 visited per needed block."""
    order = np.concatenate([epoch_order(0, epoch, len(chat_samples)) for epoch in range(4)])[:2000].reshape(500, 4)
    shape_set = ShapeSet.from_setting("auto")
    seen: Counter[ShapeClass] = Counter()
    tokens = visited = needed = 0
    for batch in order:
        one = concat_rows([Sample(*(a[:max_length] for a in chat_samples[i][:2])) for i in batch])
        shape = shape_set.classify([one])
        blocks = shape.tokens // 128
        seen[shape] += 1
        tokens += len(one.input_ids)
        visited += blocks + shape.lanes
        needed += blocks + count_lanes(pad_visible(one.visible_until, shape.tokens), 128)
    assert len(seen) <= programs
    assert 1 - tokens / sum(shape.tokens * n for shape, n in seen.items()) <= padding
    assert visited / needed <= visits
