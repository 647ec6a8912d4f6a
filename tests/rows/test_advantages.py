"""Advantages and the normalisation of each loss type against numbers worked out by hand (cases C24, C25, C26)."""

import numpy as np
import pytest

from jaxtrl.rows.advantages import group_advantages, normalise_row
from jaxtrl.rows.batch import Row, Sample, concat_rows

NAN = float("nan")


def advantages(rewards, scale="group"):
    got = group_advantages(np.array(rewards), scale)
    assert got.dtype == np.float32
    return got


def test_standard_deviation_of_a_sample():
    """Case C24(a): n - 1 below the root, and 1e-4 added."""
    np.testing.assert_allclose(advantages([1.0, 0, 0, 0]), [1.499700, -0.4999, -0.4999, -0.4999], atol=1e-6)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("rewards", [[0.5] * 4, [0.7], [NAN, NAN], np.float32([0.1] * 7), np.float32([0.95] * 8)])
def test_no_difference_gives_exactly_zero(rewards, scale):
    """Case C24(b), (c), (d)."""
    assert not advantages(rewards, scale).any()


def test_rounding_of_equal_rewards_stays_small():
    """Sums of weighted rewards may differ in the last bit."""
    assert np.abs(advantages(np.float32([0.1, 0.1, np.nextafter(np.float32(0.1), np.float32(1))]))).max() < 1e-3


@pytest.mark.parametrize("scale", ["group", "none"])
def test_none_is_left_out(scale):
    """Case C25: a completion without a reward changes neither mean nor deviation, and has advantage 0."""
    want = {"group": [0.577250, 0, -1.154501, 0.577250], "none": [1 / 3, 0, -2 / 3, 1 / 3]}[scale]
    np.testing.assert_allclose(advantages([1, NAN, 0, 1], scale), want, atol=1e-6)


def test_groups_are_apart_and_batch_scales_by_all():
    rewards = np.array([[1.0, 0.0, NAN], [4.0, 8.0, 6.0], [3.0, 3.0, 3.0]])
    np.testing.assert_allclose(advantages(rewards), [advantages(group) for group in rewards])
    std = np.array([1, 0, 4, 8, 6, 3, 3, 3]).std(ddof=1) + 1e-4
    want = np.array([[0.5, -0.5, 0], [-2, 2, 0], [0, 0, 0]]) / std
    np.testing.assert_allclose(advantages(rewards, "batch"), want, rtol=1e-6)


def test_refusals():
    with pytest.raises(ValueError, match="scale_rewards is 'std': use one of group, batch, none"):
        advantages([1.0, 2.0], "std")
    with pytest.raises(ValueError, match="a reward is infinite"):
        advantages([1.0, np.inf])
    with pytest.raises(ValueError, match="loss_type is 'ppo': use one of grpo, dr_grpo, dapo, bnpo, cispo"):
        normalise_row(concat_rows([]), "ppo")
    with pytest.raises(ValueError, match="divides by max_completion_length, which is None"):
        normalise_row(concat_rows([]), "dr_grpo")


def rows(*lengths: int) -> Row:
    """A prompt of two tokens and completions of these lengths."""
    samples = [Sample(np.arange(2 + n, dtype=np.int32), np.arange(2 + n) >= 2, 0.0) for n in lengths]
    return concat_rows(samples)


@pytest.mark.parametrize(
    ("loss_type", "loss", "with_one_more"),
    [
        ("grpo", 0.0, 0.0),
        ("dapo", 1 / 3, 1 / 3),
        ("bnpo", 1 / 3, 1 / 3),
        ("cispo", 1 / 3, 1 / 3),
        ("dr_grpo", 2 / (2 * 8), 2 / (3 * 8)),
    ],
)
def test_reduction(loss_type, loss, with_one_more):
    """Case C26: token losses [-1, -1] and [1, 1, 1, 1], in one row or in two; and with an untrained completion."""

    def total(*parts, untrained=0):
        normalised = [normalise_row(rows(*part), loss_type, 8, untrained * (i == 0)) for i, part in enumerate(parts)]
        losses = [np.where(np.repeat(part, part) == 2, -1.0, 1.0) for part in parts]
        weighted = sum(float((row.weight * x).sum()) for row, x in zip(normalised, losses, strict=True))
        return weighted / sum(row.denominator for row in normalised)

    assert total([2, 4]) == pytest.approx(loss)
    assert total([2], [4]) == pytest.approx(loss)
    assert total([2], [4], []) == pytest.approx(loss)
    assert total([2], [4], untrained=1) == pytest.approx(with_one_more)


def test_per_completion_mean_with_gaps():
    """Sample numbers of a row may leave some out: those whose tokens are all untrained."""
    row = rows(1, 3)._replace(term_sample=np.array([5, 2, 2, 2], np.int32))
    got = normalise_row(row, "grpo", untrained=2)
    np.testing.assert_allclose(got.weight, [1, 1 / 3, 1 / 3, 1 / 3])
    assert got.denominator == 4
