"""Windows: a permutation that keeps what it must, and falls on few classes with little padding."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtrl.rows.ladder import ShapeSet
from jaxtrl.rows.order import epoch_order
from jaxtrl.rows.window import window_order

SETTINGS = ("auto", 32, "none", None)


def rule(setting):
    return None if setting is None else ShapeSet.from_setting(setting, 16).token_class


def rows_of(order, tokens, per_device):
    return [int(tokens[order[i : i + per_device]].sum()) for i in range(0, len(order), per_device)]


@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=60),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 6),
    st.sampled_from(SETTINGS),
)
def test_each_window_is_dealt_out_anew_and_nothing_leaves_it(lengths, per_device, devices, window, setting):
    tokens = np.array(lengths, np.int64)
    order = epoch_order(3, 0, len(tokens))
    new = window_order(order, tokens, per_device, devices, window, rule(setting))
    lines = per_device * devices
    whole = len(order) // lines * lines
    for start in range(0, whole, window * lines):
        part = slice(start, min(start + window * lines, whole))
        assert sorted(new[part]) == sorted(order[part])
        place = {line: i for i, line in enumerate(order[part])}
        firsts = [min(place[line] for line in new[part][i : i + lines]) for i in range(0, len(new[part]), lines)]
        assert firsts == sorted(firsts)
    assert new[whole:].tolist() == order[whole:].tolist()


@pytest.mark.parametrize("devices", [1, 2])
def test_fewer_classes_and_less_padding(devices):
    rng = np.random.default_rng(0)
    tokens = (rng.lognormal(6, 0.6, 800)).astype(np.int64)
    order = epoch_order(1, 0, len(tokens))

    def account(order, setting):
        token_class = ShapeSet.from_setting(setting).token_class
        rows = np.array(rows_of(order, tokens, 4)).reshape(-1, devices)
        padded = [token_class(int(total)) for total in rows.max(axis=1)]
        return len(set(padded)), 1 - tokens.sum() / (devices * sum(padded))

    for setting, share in (("auto", 0.5), (128, 0.85)):
        token_class = ShapeSet.from_setting(setting).token_class
        before = account(order, setting)
        after = account(window_order(order, tokens, 4, devices, 16, token_class), setting)
        assert after[0] <= before[0]
        assert after[1] < share * before[1]
    spread = [np.std(rows_of(o, tokens, 4)) for o in (order, window_order(order, tokens, 4, devices, 200, None))]
    assert spread[1] < 0.15 * spread[0]  # lines longer than the mean row are left


def test_a_known_window():
    tokens = np.array([100, 10, 90, 20, 60, 50, 5])
    new = window_order(np.arange(7), tokens, 2, 1, 3, None)
    assert new.tolist() == [0, 1, 2, 3, 4, 5, 6]
    new = window_order(np.array([0, 2, 4, 5, 1, 3, 6]), tokens, 2, 1, 3, None)
    assert rows_of(new[:6], tokens, 2) == [110, 110, 110]
    assert new.tolist() == [0, 1, 2, 3, 4, 5, 6]
