"""Losses of single terms against NumPy (case C27), bounds, and options that are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrl.rows.advantages import normalise_row
from jaxtrl.rows.batch import Sample, concat_rows
from jaxtrl.train.policy import PolicyLoss, cispo, clipped, k3
from tests.train.policy_reference import mean_reports, step_loss

RATIO = np.array([0.5, 0.79, 0.81, 1.0, 1.19, 1.21, 1.3, 5.0])


def value_and_slope(function, ratio, advantage):
    """Of a function of the ratio, by the ratio; in float32."""
    ratio, advantage = (jnp.asarray(x, jnp.float32) for x in np.broadcast_arrays(ratio, advantage))
    value, pull = jax.vjp(lambda r: function(r, advantage), ratio)
    return np.asarray(value), np.asarray(pull(jnp.ones_like(ratio))[0])


@pytest.mark.parametrize("advantage", [1.5, -0.5, 0.0])
def test_clipped(advantage):
    value, slope = value_and_slope(lambda r, a: clipped(r, a, 0.2, 0.28), RATIO, advantage)
    np.testing.assert_allclose(value, -np.minimum(RATIO * advantage, np.clip(RATIO, 0.8, 1.28) * advantage), rtol=1e-6)
    acts = (RATIO < 1.28) if advantage > 0 else (RATIO > 0.8)
    np.testing.assert_allclose(slope, -advantage * acts, rtol=1e-6)


def test_delta_bounds_what_a_negative_advantage_can_do():
    value, slope = value_and_slope(lambda r, a: clipped(r, a, 0.2, 0.2, delta=3.0), RATIO, -2.0)
    np.testing.assert_allclose(value, 2 * np.clip(RATIO, 0.8, 3.0), rtol=1e-6)
    np.testing.assert_allclose(slope, 2.0 * ((RATIO > 0.8) & (RATIO < 3)), rtol=1e-6)
    value, _ = value_and_slope(lambda r, a: clipped(r, a, 0.2, 0.2, delta=3.0), RATIO, 2.0)
    np.testing.assert_allclose(value, -2 * np.minimum(RATIO, 1.2), rtol=1e-6)


def test_old_log_probs_are_kept():
    """Case C27: old p 0.5, now 0.7: beyond the bound, so an advantage of 1 has no gradient and one of -1 has."""
    value, slope = value_and_slope(lambda r, a: clipped(r, a, 0.2, 0.2), 0.7 / 0.5, np.array([1.0, -1.0]))
    np.testing.assert_allclose(value, [-1.2, 1.4], rtol=1e-6)
    np.testing.assert_allclose(slope, [0, 1], rtol=1e-6)


def test_cispo():
    logp = jnp.log(jnp.asarray([0.2, 0.7], jnp.float32))
    function = lambda x: cispo(jnp.exp(x - jnp.log(0.1)), jnp.asarray([2.0, -1.0]), x, 4.0)  # noqa: E731
    value, pull = jax.vjp(function, logp)
    np.testing.assert_allclose(value, [-2 * 2 * np.log(0.2), 4 * np.log(0.7)], rtol=1e-5)
    np.testing.assert_allclose(pull(jnp.ones(2))[0], [-4, 4], rtol=1e-5)


def test_k3():
    p, q = np.array([0.2, 0.5, 0.3]), np.array([0.25, 0.25, 0.5])
    got = np.asarray(k3(jnp.log(jnp.asarray(p)), jnp.log(jnp.asarray(q))))
    np.testing.assert_allclose(got, q / p - 1 - np.log(q / p), rtol=1e-4, atol=1e-6)
    assert (p * got).sum() == pytest.approx((p * np.log(p / q)).sum(), rel=1e-5)
    assert not np.asarray(k3(jnp.asarray(p), jnp.asarray(p))).any()


def random_samples() -> tuple[list[Sample], list[np.ndarray]]:
    """Completions of 1 to 6 tokens, and their log-probs. The seed reaches every bound at both levels."""
    draw, samples, logps = np.random.default_rng(19), [], []
    for n in (1, 2, 3, 4, 5, 6):
        logp = draw.normal(-2, 1, n + 1)
        near = [(logp + draw.normal(0, 0.5, n + 1)).astype(np.float32) for _ in range(3)]
        samples.append(Sample(np.arange(n + 1, dtype=np.int32), np.arange(n + 1) > 0, float(draw.normal()), *near))
        logps.append(logp[1:])
    return samples, logps


OPTIONS = {
    "clipped": {"epsilon_high": 0.28},
    "dual clip": {"delta": 1.3},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.1},
    "kl": {"beta": 0.2},
    "plain kl": {"beta": 0.2, "use_bias_correction_kl": False, "loss_type": "cispo", "epsilon_high": 1.1},
    "token truncate": {"importance_sampling_mode": "token_truncate", "importance_sampling_clip_max": 1.2},
    "token mask": {"importance_sampling_mode": "token_mask", "importance_sampling_clip_max": 1.2, "beta": 0.1},
    "sequence truncate": {"importance_sampling_mode": "sequence_truncate", "importance_sampling_clip_max": 1.2},
    "sequence mask": {"importance_sampling_mode": "sequence_mask", "importance_sampling_clip_max": 1.2},
}


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_equals_numpy(name, level):
    """Loss, its derivative by every log-prob, and what is reported; two entries at the end are unused."""
    options = OPTIONS[name] | {"importance_sampling_level": level}
    samples, logps = random_samples()
    row = normalise_row(concat_rows(samples), options.get("loss_type", "dapo"))
    row = jax.tree.map(lambda x: jnp.asarray(np.pad(x, (0, 2))) if np.ndim(x) else x, row)
    policy = PolicyLoss(**options)

    def total(logp):
        terms = policy.evaluate(logp, row)
        return jnp.where(row.weight != 0, row.weight * terms.loss, 0.0).sum() / row.denominator, terms

    logp = jnp.asarray(np.append(np.concatenate(logps), [-50.0, 3.0]), jnp.float32)
    (loss, terms), slope = jax.value_and_grad(total, has_aux=True)(logp)
    want, slopes, reports = step_loss(logps, samples, options, 6)
    assert float(loss) == pytest.approx(want, rel=1e-5)
    np.testing.assert_allclose(slope, [*np.concatenate(slopes), 0, 0], rtol=2e-5, atol=1e-6)
    shares = {"kl": 1, "mismatch": 1, "importance": terms.importance_share}
    for key, mean in mean_reports(reports, options).items():
        share = np.broadcast_to(shares.get(key, terms.ratio_share), (23,))[:21]
        got = (share * getattr(terms, key)[:21]).sum() / share.sum()
        assert got == pytest.approx(mean, rel=1e-5, abs=1e-6), key
    assert all(0 < np.concatenate([r[key] for r in reports]).mean() < 1 for key in ("high", "low") if name == "clipped")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loss_type": "sapo"}, "loss_type is 'sapo': use one of grpo"),
        ({"importance_sampling_level": "word"}, "importance_sampling_level is 'word': use one of token, sequence"),
        ({"importance_sampling_mode": "token"}, "importance_sampling_mode is 'token': use one of token_truncate"),
        ({"epsilon": 1.0}, "epsilon is 1.0"),
        ({"epsilon_high": -0.1}, "epsilon_high is -0.1"),
        ({"beta": float("nan")}, "beta is nan"),
        ({"delta": float("inf")}, "delta is inf"),
        ({"loss_type": "cispo"}, "by epsilon_high alone: set it"),
        ({"loss_type": "cispo", "epsilon_high": 5.0, "delta": 2.0}, "leave delta out"),
        ({"importance_sampling_mode": "token_mask", "importance_sampling_clip_min": 4.0}, "clip_min 4.0 must be"),
        ({"importance_sampling_mode": "token_mask", "importance_sampling_clip_max": None}, "needs importance_sampling"),
    ],
)
def test_refusals(options, words):
    with pytest.raises(ValueError, match=words):
        PolicyLoss(**options)
