"""The GRPO step on tree rows against NumPy on the same samples in separate rows: loss, metrics, every gradient.

The reference takes each sample's log-probs from a row of its own, evaluates the loss in float64 as the papers write it,
differentiates it numerically, and lets the supervised step (which other tests compare with TRL) turn the
derivatives by log-probs into gradients, again one sample a row.
"""

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtrl.model.config import Qwen3Config
from jaxtrl.model.hf import params_from_hf
from jaxtrl.rollout.requests import SamplingParams
from jaxtrl.rollout.sampler import Sampler
from jaxtrl.rows.advantages import LOSS_TYPES, normalise_row
from jaxtrl.rows.batch import TERM_COLUMNS, RowBatch, Sample, ShapeClass, concat_rows, make_batch
from jaxtrl.rows.tree import tree_row
from jaxtrl.train.grpo import make_grpo_step, slope_of_chunk
from jaxtrl.train.losses import take_slots
from jaxtrl.train.mesh import make_mesh, replicated
from jaxtrl.train.policy import PolicyLoss
from jaxtrl.train.state import TrainState
from jaxtrl.train.step import Accumulated, make_score_step, make_sft_step
from tests.fixture_t import CONFIG, tensors
from tests.rollout.models import fixture_t
from tests.train.policy_reference import mean_reports, step_loss, token_losses

CONFIG_T = Qwen3Config.from_dict(CONFIG)
SHAPE = ShapeClass(40, 32, 32, 10)  # 5 blocks of 8
SGD = optax.sgd(1.0)
LONGEST = 6  # max_completion_length
EVERYTHING = {
    "beta": 0.3,
    "delta": 1.35,
    "importance_sampling_mode": "sequence_truncate",
    "importance_sampling_clip_max": 1.5,
}


def batch(*rows) -> RowBatch:
    return make_batch(rows, SHAPE, 8)


@pytest.fixture(scope="module")
def params():
    return params_from_hf(CONFIG_T, tensors())


@lru_cache
def score(temperature=1.0):
    return make_score_step(CONFIG_T, temperature=temperature)


@lru_cache
def grpo(devices=None, **options):
    options = dict(options)
    return make_grpo_step(CONFIG_T, SGD, devices and make_mesh(devices), donate=False, **options)


@lru_cache
def supervised():
    return make_sft_step(CONFIG_T, SGD, donate=False)


def log_probs(params, sample: Sample) -> np.ndarray:
    """Of the sample's trained tokens, from a row of its own."""
    row = concat_rows([sample])._replace(**dict.fromkeys(TERM_COLUMNS))
    return np.asarray(score()(params, batch(row))[0][0, : len(row.weight)], np.float64)


@pytest.fixture(scope="module")
def samples(params):
    """Completions of two prompts that share tokens and slots: two are the same but for their advantages and columns.

    Old log-probs lie so that some ratios are beyond the bounds on either side, for advantages of both signs.
    """
    draw, out = np.random.default_rng(0), []
    for group, (prompt, completions) in enumerate(
        [([5, 9, 12], [[3, 7, 1], [3, 20, 11, 4], [3, 7, 1], [8, 2, 6]]), ([5, 40, 7], [[3, 7, 30], [9], [3, 7]])]
    ):
        for number, completion in enumerate(completions):
            ids = np.array([*prompt, *completion], np.int32)
            columns = {name: draw.normal(0, 0.4, len(ids)).astype(np.float32) for name in ("old", "ref", "sampler")}
            sample = Sample(ids, np.arange(len(ids)) >= 3, (1.2, -0.7, -1.6, 0.4)[number], group=group)
            logp = np.concatenate([np.zeros(3), log_probs(params, sample)]).astype(np.float32)
            old = logp - columns["old"]
            sampler = old - columns["sampler"]
            out.append(sample._replace(old_logp=old, ref_logp=logp - columns["ref"], sampler_logp=sampler))
    return out


def reference(params, samples: list[Sample], options: dict[str, Any]) -> tuple[float, Any, list[dict[str, Any]]]:
    """Loss, gradient by every parameter, reports."""
    logps = [log_probs(params, s) for s in samples]
    loss, slopes, reports = step_loss(logps, samples, options, LONGEST)
    gradients = supervised().init(params)
    for s, slope in zip(samples, slopes, strict=True):
        row = concat_rows([s])._replace(weight=-slope.astype(np.float32), **dict.fromkeys(TERM_COLUMNS))
        gradients = supervised().accumulate(params, gradients, batch(row))
    return loss, gradients.gradients, reports


def assert_gradients(got: Any, want: Any) -> None:
    """1e-5 of the norm of each parameter's gradient; entries of rounding size are compared with the largest."""
    scale = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(want))

    def compare(path, x, y):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        name = jax.tree_util.keystr(path)
        assert np.linalg.norm(x - y) <= 1e-5 * np.linalg.norm(y) + 1e-6 * scale, f"{name}: {np.abs(x - y).max()}"

    jax.tree_util.tree_map_with_path(compare, got, want)


def total_of(params, options: dict[str, Any], *batches: RowBatch, devices=None) -> Accumulated:
    if options["loss_type"] != "cispo":  # one program, as a test below shows
        options = options | {"loss_type": "dapo"}
    step = grpo(devices, **options)
    params = jax.device_put(params, replicated(devices and make_mesh(devices)))
    acc = step.init(params)
    for one in batches:
        acc = step.accumulate(params, acc, one)
    return jax.device_get(acc)


def check(params, samples, options, *batches, devices=None):
    """Loss, gradients and metrics of these batches against the reference."""
    loss, gradients, reports = reference(params, samples, options)
    acc = total_of(params, options, *batches, devices=devices)
    scale = 1 / acc.sums.denominator
    assert acc.sums.loss * scale == pytest.approx(loss, rel=1e-5, abs=1e-6)
    assert_gradients(jax.tree.map(lambda g: g * scale, acc.gradients), gradients)
    terms = sum(len(report["kl"]) for report in reports)
    assert acc.sums.terms == terms
    means = {"kl": acc.sums.kl / terms, "mismatch": acc.sums.mismatch / terms}
    means |= {name: getattr(acc.sums, name) / acc.sums.ratios for name in ("ratio", "low", "high")}
    means["importance"] = acc.sums.importance / acc.sums.importances
    for name, want in mean_reports(reports, options).items():
        assert means[name] == pytest.approx(want, rel=1e-5, abs=1e-6), name
    assert peaks_of(acc) == pytest.approx(extremes(reports), rel=1e-5, abs=1e-6)


def extremes(reports: list[dict[str, Any]]) -> dict[str, float]:
    """Of tokens; the clipped share is one number of each completion."""
    importance = np.concatenate([r.get("importance", np.ones(1)) for r in reports])
    return {
        "mismatch": max(r["mismatch"].max() for r in reports),
        "low": min(r["low"].mean() for r in reports),
        "high": max(r["high"].mean() for r in reports),
        "largest": importance.max(),
        "smallest": importance.min(),
    }


def peaks_of(acc: Accumulated) -> dict[str, float]:
    mismatch, minus_low, high, importance, minus_importance = map(float, acc.peaks)
    values = mismatch, -minus_low, high, importance, -minus_importance
    return dict(zip(("mismatch", "low", "high", "largest", "smallest"), values, strict=True))


def options_of(loss_type: str, level: str, **more) -> dict[str, Any]:
    bound = {"epsilon_high": 1.1 if loss_type == "cispo" else 0.28}
    return {"loss_type": loss_type, "importance_sampling_level": level, **bound, **more}


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_tree_row_equals_separate_rows(params, samples, loss_type, level):
    row = normalise_row(tree_row(samples), loss_type, LONGEST)
    assert len(row.input_ids) < sum(len(s.input_ids) for s in samples) / 2
    assert len(row.slot_index) < len(row.weight)  # terms share slots
    check(params, samples, options_of(loss_type, level), batch(row))


def test_loss_types_are_one_program(params, samples):
    """But for cispo the device does not know them."""
    row = batch(normalise_row(tree_row(samples), "dapo"))
    args = params, jax.eval_shape(grpo().init, params), row
    dapo, *others = (str(grpo(loss_type=name).accumulate.trace(*args).jaxpr) for name in ("dapo", "grpo", "dr_grpo"))
    assert others == [dapo, dapo]


def test_the_samples_reach_every_bound(params, samples):
    """Clipping below and above, at both levels, and the cap of the correction: else the tests here prove little."""
    for level in ("token", "sequence"):
        reports = [token_losses(log_probs(params, s), s, options_of("dapo", level, **EVERYTHING))[1] for s in samples]
        assert all(0 < np.concatenate([r[name] for r in reports]).mean() < 1 for name in ("low", "high"))
        factors = np.concatenate([r["importance"] for r in reports])
        assert factors.min() < 1 < factors.max() == 1.5


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [options_of("dapo", "token"), options_of("grpo", "sequence", **EVERYTHING)], ids=["token", "sequence"]
)
def test_accumulated_and_on_two_devices(params, samples, options):
    """One normaliser for a step, however its samples are spread over rows, micro-batches and devices."""
    parts = [samples[:3], samples[3:4], samples[4:], []]
    rows = [normalise_row(tree_row(part), options["loss_type"]) for part in parts]
    check(params, samples, options, *map(batch, rows[:3]))
    check(params, samples, options, batch(*rows[:2]), batch(*rows[2:]), devices=2)


def test_derivative_chunk_by_chunk(params, samples):
    """What the head is told about some slots is what differentiating the whole loss gives them."""
    row = jax.tree.map(jnp.asarray, normalise_row(tree_row(samples), "dapo"))
    policy = PolicyLoss(epsilon_high=0.28, beta=0.2, importance_sampling_mode="sequence_truncate")
    logp = jnp.asarray(np.random.default_rng(0).normal(-4, 1, len(row.slot_index)), jnp.float32)
    weighted = lambda logp: row.weight * policy.evaluate(take_slots(logp, row.term_slot), row).loss  # noqa: E731
    whole = np.asarray(jax.grad(lambda logp: weighted(logp).sum())(logp))
    assert (whole != 0).sum() > len(whole) / 2
    for start, end in ((0, len(whole)), (0, 5), (5, 12), (len(whole) - 3, len(whole))):
        padded = jnp.pad(jnp.arange(start, end), (0, 2)), jnp.pad(logp[start:end], (0, 2))
        got = slope_of_chunk(policy, row, padded[1], padded[0])
        np.testing.assert_allclose(got[: end - start], whole[start:end], rtol=1e-5, atol=1e-7)


def metrics_of(params, samples, **options) -> dict[str, float]:
    """After one whole step on the tree row of the samples."""
    state = TrainState.create(params, SGD)
    _, metrics = grpo(**options)(state, batch(normalise_row(tree_row(samples), "dapo")))
    return {name: float(value) for name, value in metrics.items()}


def with_logps(prompt: list[int], completions: list[list[int]], logps: list[list[float]]) -> list[Sample]:
    """With these old log-probs, the advantages 1, -1, 1, ..."""
    out = []
    for number, (completion, logp) in enumerate(zip(completions, logps, strict=True)):
        ids = np.array([*prompt, *completion], np.int32)
        old = np.array([*[9.0] * len(prompt), *logp], np.float32)
        out.append(Sample(ids, np.arange(len(ids)) >= len(prompt), (-1.0) ** number, old))
    return out


def assert_on_policy(metrics: dict[str, float], atol: float) -> None:
    assert metrics["ratio"] == pytest.approx(1, abs=atol)
    assert metrics["kl"] == pytest.approx(0, abs=atol**2)
    assert metrics["sampling/sampling_logp_difference/mean"] < atol
    assert metrics["clip_ratio/region_mean"] == metrics["skipped"] == 0


@pytest.mark.slow
def test_first_update_of_what_the_sampler_drew_is_on_policy(params):
    """The ratio is 1 and the divergence 0 where nothing is stale, so the loss is -mean(A)."""
    sampler = Sampler(fixture_t(), slots=4, max_length=16, tokens_per_call=4)
    drawn = sampler.generate([[5, 9, 12]], SamplingParams(max_new_tokens=5, seed=0), num_generations=4)
    samples = with_logps([5, 9, 12], [c.token_ids.tolist() for c in drawn], [c.logps.tolist() for c in drawn])
    metrics = metrics_of(params, samples)
    assert_on_policy(metrics, 1e-5)
    lengths = np.array([len(c.token_ids) for c in drawn])
    assert metrics["num_terms"] == lengths.sum()
    assert metrics["loss"] == pytest.approx(-(lengths * [1, -1, 1, -1]).sum() / lengths.sum(), abs=1e-5)


def test_known_log_probs_are_on_policy(params):
    """Case C30: the log-probs of three completions that share tokens and slots."""
    logps = [
        [-4.605965, -5.312547, -4.274724],
        [-4.605965, -3.044685, -5.604728, -4.755763],
        [-4.611031, -4.395921, -2.847103],
    ]
    samples = with_logps([5, 9, 12], [[3, 7, 1], [3, 20, 11, 4], [8, 2, 6]], logps)
    assert len(tree_row(samples).input_ids) == 12
    metrics = metrics_of(params, samples)
    assert_on_policy(metrics, 1e-4)
    assert metrics["loss"] == pytest.approx(-(3 - 4 + 3) / 10, abs=1e-4)


def test_temperature_is_part_of_the_log_probs(params):
    """Case C22(b): temperature 0.5; with the log-probs of temperature 1 the ratio would be far from 1."""
    right = with_logps([5, 9, 12], [[3, 7]], [[-6.060610, -6.959415]])
    assert_on_policy(metrics_of(params, right, temperature=0.5), 1e-4)
    wrong = metrics_of(params, with_logps([5, 9, 12], [[3, 7]], [[-4.605965, -5.312547]]), temperature=0.5)
    assert wrong["ratio"] == pytest.approx(np.exp([4.605965 - 6.060610, 5.312547 - 6.959415]).mean(), rel=1e-3)


def test_metrics_of_a_step(params, samples):
    """They are the sums over all terms, divided; a step of padding alone has no loss, gradient or ratio."""
    options = options_of("dapo", "token")
    want = mean_reports([token_losses(log_probs(params, s), s, options)[1] for s in samples], options)
    got = metrics_of(params, samples, **options)
    names = {"ratio": "ratio", "kl": "kl", "sampling/sampling_logp_difference/mean": "mismatch"}
    names |= {"clip_ratio/low_mean": "low", "clip_ratio/high_mean": "high"}
    assert {name: got[name] for name in names} == pytest.approx({n: want[m] for n, m in names.items()}, rel=1e-5)
    assert got["clip_ratio/region_mean"] == pytest.approx(want["low"] + want["high"], rel=1e-5)
    state = TrainState.create(params, SGD)
    row = batch(normalise_row(tree_row(samples), "dapo"))
    empty = row._replace(weight=np.zeros_like(row.weight), denominator=np.zeros_like(row.denominator))
    after, metrics = grpo(**options)(state, empty)
    assert set(map(float, metrics.values())) == {0.0}
    jax.tree.map(np.testing.assert_array_equal, after.params, params)


@pytest.mark.parametrize(
    ("options", "column"),
    [({}, "old_logp"), ({"beta": 0.1}, "ref_logp"), ({"importance_sampling_mode": "token_mask"}, "sampler_logp")],
)
def test_a_missing_column_is_named(params, samples, options, column):
    row = batch(tree_row([s._replace(**{column: None}) for s in samples]))
    with pytest.raises(ValueError, match=f"the batch has no column {column}, which this loss needs"):
        grpo(**options)(TrainState.create(params, SGD), row)
