"""Sampling against the exact distributions, computed here with float64 and sorts."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2

from jaxtrl.hardware.neuron import lint
from jaxtrl.rollout import sampling
from jaxtrl.rollout.sampling import Controls, draw, draw_slots, pick
from jaxtrl.rollout.skinny import COMPILER_OPTIONS

DRAWS = 200_000
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


def controls(**given) -> Controls:
    values = {**OFF, **given}
    return Controls(*(np.asarray(values[name], np.int32 if name == "top_k" else np.float32) for name in OFF))


def exact(logits: np.ndarray, seen: np.ndarray | None = None, **given) -> np.ndarray:
    """The distribution after every filter, ties at a threshold kept."""
    values = {**OFF, **given}
    x = logits.astype(np.float64)
    if seen is not None:
        penalised = np.where(x < 0, x * values["repetition_penalty"], x / values["repetition_penalty"])
        x = np.where(seen, penalised, x)
    p = np.exp((x - x.max()) / values["temperature"])
    if values["top_k"]:
        p[x < np.sort(x)[-min(values["top_k"], len(x))]] = 0
    if values["top_p"] < 1:
        descending = np.sort(p)[::-1]
        count = int(np.searchsorted(np.cumsum(descending), values["top_p"] * p.sum())) + 1
        p[p < descending[count - 1]] = 0
    p[p < values["min_p"] * p.max()] = 0
    return p / p.sum()


def check_fit(tokens: np.ndarray, p: np.ndarray) -> None:
    """Chi-squared at the level 1e-4; tokens expected fewer than 10 times count as one. None of probability 0 occurs."""
    counts = np.bincount(tokens, minlength=len(p))
    assert counts.shape == p.shape
    assert counts[p == 0].sum() == 0
    expected = p * counts.sum()
    rare = expected < 10
    groups = np.append(expected[~rare], expected[rare].sum()), np.append(counts[~rare], counts[rare].sum())
    expected, counts = (g[groups[0] > 0] for g in groups)
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert statistic < chi2.isf(1e-4, max(1, len(expected) - 1))


LOGITS = np.random.default_rng(3).normal(0, 2, 64).astype(np.float32)
TIED = np.array([2.0, 1, 1, 1, 0, 0, -1, -1] * 8, np.float32)
SEEN = np.arange(64) % 3 == 0
CASES = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"top_k": 5},
    {"top_k": 1},
    {"top_k": 64},
    {"top_k": 500},
    {"top_p": 0.7},
    {"top_p": 1e-6},
    {"top_p": 1.0, "top_k": 3},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.3},
]


@partial(jax.jit, compiler_options=COMPILER_OPTIONS)
def many(logits, uniforms, values, seen):
    """Filtered draws as on CPU: 10,000 slots with the same logits."""
    drawn = jax.vmap(lambda u: draw(logits, u, values, seen, jnp.zeros_like(seen), halvings=3))(uniforms)
    return drawn.token, drawn.logp, drawn.sampled_logp


@pytest.mark.parametrize("given", CASES, ids=str)
@pytest.mark.parametrize("logits", [LOGITS, TIED], ids=["distinct", "tied"])
def test_draws_fit_the_exact_distribution(logits, given):
    uniforms = np.random.Generator(np.random.Philox(7)).random((DRAWS // 10_000, 10_000), np.float32)
    parts = [many(logits, row, controls(**given), SEEN) for row in uniforms]
    tokens, logp, sampled_logp = (np.concatenate([part[i] for part in parts]) for i in range(3))
    p = exact(logits, SEEN, **given)
    check_fit(tokens, p)
    plain = exact(logits, temperature=given.get("temperature", 1.0))
    np.testing.assert_allclose(logp, np.log(plain[tokens]), atol=1e-5)
    np.testing.assert_allclose(sampled_logp, np.log(p[tokens]), atol=1e-5)


def test_plain_draws_fit_and_agree_with_neutral_filters():
    uniforms = np.random.Generator(np.random.Philox(7)).random(DRAWS, np.float32)
    values = controls(temperature=0.7)
    plain = jax.jit(jax.vmap(lambda u: draw(jnp.asarray(LOGITS), u, values)))(uniforms)
    check_fit(np.asarray(plain.token), exact(LOGITS, temperature=0.7))
    np.testing.assert_allclose(plain.logp, plain.sampled_logp, atol=1e-6)
    filtered = many(LOGITS, uniforms[:10_000], values, SEEN)[0]
    np.testing.assert_array_equal(plain.token[:10_000], filtered)


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [{}, {"top_k": 50}, {"top_p": 0.95}, {"min_p": 0.01}, {"temperature": 0.6}, {"repetition_penalty": 1.3}],
    ids=str,
)
def test_draws_from_the_vocabulary_of_qwen3(given):
    """One slot's weights by the filters, then 200,000 uniform numbers through the inverse of its distribution."""
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 3, 151_936).astype(np.float32)
    logits[::7] = np.round(logits[::7])  # ties
    seen = jnp.asarray(rng.random(151_936) < 0.1)
    values = controls(**given)

    @partial(jax.jit, compiler_options=COMPILER_OPTIONS)
    def weights_of(logits):
        scores = sampling._blocks(sampling._penalised(logits, seen, values) / values.temperature)
        return sampling._filtered(scores, jnp.exp(scores - scores.max()), values, halvings=3)

    weights = weights_of(logits)
    p = exact(logits, np.asarray(seen), **given)
    own = np.asarray(weights, np.float64).reshape(-1)
    assert own[151_936:].sum() == 0
    np.testing.assert_array_equal(own[:151_936] > 0, p > 0)
    np.testing.assert_allclose(own[:151_936] / own.sum(), p, rtol=2e-5)
    picks = jax.jit(jax.vmap(pick, (None, 0)))
    uniforms = rng.random((DRAWS // 10_000, 10_000), np.float32)
    check_fit(np.concatenate([picks(weights, row) for row in uniforms]), p)


def slots(count: int, **given) -> Controls:
    return Controls(*(np.repeat(value, count) for value in controls(**given)))


def test_every_slot_has_its_own_parameters():
    logits = np.stack([LOGITS, LOGITS[::-1], TIED])
    values = Controls(*(np.concatenate(x) for x in zip(slots(2, temperature=0.0), slots(1, top_k=1), strict=True)))
    none = np.zeros(logits.shape, bool)
    drawn = jax.jit(draw_slots)(logits, np.array([0.9, 0.1, 0.0], np.float32), values, none, none)
    assert drawn.token.tolist() == [LOGITS.argmax(), LOGITS[::-1].argmax(), 0]
    assert np.isfinite(drawn.logp).all()
    np.testing.assert_allclose(drawn.sampled_logp, [0, 0, np.log(1 / 8)], atol=1e-6)


def test_forbidden_tokens_are_never_drawn_not_even_greedily():
    best = LOGITS.argmax()
    forbidden = np.arange(64) == best
    for temperature in (0.0, 1.0):
        values = slots(1000, temperature=temperature)
        uniforms = np.linspace(0, 1, 1000, endpoint=False, dtype=np.float32)
        logits, none = np.tile(LOGITS, (1000, 1)), np.zeros((1000, 64), bool)
        drawn = jax.jit(draw_slots)(logits, uniforms, values, none, np.tile(forbidden, (1000, 1)))
        assert best not in drawn.token
        if temperature == 0:
            assert set(drawn.token.tolist()) == {int(np.where(forbidden, -np.inf, LOGITS).argmax())}


def test_c22_logp_is_tempered_and_the_truncated_one_is_kept_apart():
    logits = np.array([[2.0, 1.0, 0.0]] * 4, np.float32)
    values = Controls(
        np.array([0.5, 1.0, 1.0, 0.0], np.float32),
        np.array([0, 0, 2, 0], np.int32),
        *(np.full(4, value, np.float32) for value in (1, 0, 1)),
    )
    none = np.zeros(logits.shape, bool)
    drawn = jax.jit(draw_slots)(logits, np.zeros(4, np.float32), values, none, none)
    assert drawn.token.tolist() == [0, 0, 0, 0]
    np.testing.assert_allclose(drawn.logp, [-0.142932, -0.407606, -0.407606, -0.407606], atol=1e-6)
    np.testing.assert_allclose(drawn.sampled_logp, [-0.142932, -0.407606, -0.313262, 0.0], atol=1e-6)


@given(st.integers(0, 2**32 - 1), st.integers(2, 40), st.floats(0, 1, exclude_max=True, width=32))
def test_pick_never_takes_a_token_without_weight(seed, size, uniform):
    rng = np.random.default_rng(seed)
    weights = (rng.random((3, 40)) * 10.0 ** rng.integers(-20, 3, (3, 40)) * (rng.random((3, 40)) < 0.2)).astype("f4")
    weights[:, size:] = 0
    weights[rng.integers(3), rng.integers(size)] = 1e-30
    assert weights.reshape(-1)[PICK(weights, np.float32(uniform))] > 0


PICK = jax.jit(pick)


def test_the_same_whatever_the_scale_and_sign_of_logits():
    """Thresholds are exact for numbers of any size: 2e-38 and 0 are told apart."""
    logits = np.array([1e30, 1e-30, 0.0, -0.0, -1e-30, -5, 3, 2e-38], np.float32)
    values = Controls(np.float32(1), np.int32(4), np.float32(1), np.float32(0), np.float32(1))
    scores = sampling._blocks(jnp.asarray(logits))
    kept = sampling._filtered(scores, jnp.ones_like(scores), values).reshape(-1)[:8]
    assert kept.tolist() == [1, 1, 0, 0, 0, 0, 1, 1]


def test_several_halvings_a_pass_find_the_same_thresholds():
    one, three = (
        jax.jit(jax.vmap(partial(sampling._filtered, halvings=n), (0, 0, None)), compiler_options=COMPILER_OPTIONS)
        for n in (1, 3)
    )
    rng = np.random.default_rng(8)
    scores = (rng.normal(0, 1, (200, 16, 32)) * 10.0 ** rng.integers(-30, 3, (200, 1, 1))).astype(np.float32)
    scores[::2] = np.round(scores[::2] * 4) / 4
    weights = np.exp(scores - scores.max((1, 2), keepdims=True))
    for kept in ({"top_k": 7}, {"top_p": 0.6}, {"top_k": 300, "top_p": 0.99}, {}):
        np.testing.assert_array_equal(*(f(scores, weights, controls(**kept)) for f in (one, three)))


@pytest.mark.parametrize("slots", [1, 3])
def test_slots_reduced_together_draw_what_each_draws_alone(slots):
    rng = np.random.default_rng(slots)
    logits, uniforms = rng.normal(0, 3, (slots, 1000)).astype(np.float32), rng.random(slots, np.float32)
    values = Controls(*(np.repeat(x, slots) for x in controls(top_k=50, repetition_penalty=1.2)))
    values.temperature[:] = [0.7, 0.0, 1.5][:slots]
    seen = np.tile(np.arange(1000) % 7 == 0, (slots, 1))
    for marks in ((), (seen, ~seen)):
        args = logits, uniforms, values, *marks
        one, three = (
            jax.jit(partial(draw_slots, halvings=n), compiler_options=COMPILER_OPTIONS)(*args) for n in (1, 3)
        )
        np.testing.assert_array_equal(one.token, three.token)
        np.testing.assert_allclose(one.logp, three.logp, atol=2e-6)
        np.testing.assert_allclose(one.sampled_logp, three.sampled_logp, atol=2e-6)


@pytest.mark.parametrize("filtered", [False, True])
def test_nothing_in_it_that_neuron_cannot_run(filtered):
    logits, uniform = jax.ShapeDtypeStruct((4, 1000), jnp.float32), jax.ShapeDtypeStruct((4,), jnp.float32)
    marks = (jax.ShapeDtypeStruct((4, 1000), jnp.bool_),) * 2 if filtered else ()
    assert lint(jax.jit(draw_slots), logits, uniform, slots(4), *marks) == []
