"""Steps on fixture T: known losses, one normaliser, accumulation, devices, skipped steps, donation."""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtrl.model.config import Qwen3Config
from jaxtrl.model.hf import params_from_hf
from jaxtrl.rows.batch import Row, Sample, concat_rows, make_batch
from jaxtrl.rows.blocks import needed_blocks, visited_blocks
from jaxtrl.rows.ladder import ShapeClass
from jaxtrl.train.mesh import make_mesh, replicated
from jaxtrl.train.optimizer import global_norm, make_optimizer
from jaxtrl.train.state import TrainState
from jaxtrl.train.step import make_eval_step, make_score_step, make_sft_step, skip_lanes
from tests.fixture_t import CONFIG, R1, R1_NLL, R2, R2_NLL, tensors

CONFIG_T = Qwen3Config.from_dict(CONFIG)
SHAPE = ShapeClass(16, 16, 16, 2)
SGD = optax.sgd(1.0)  # the change of the parameters is the gradient
ADAMW = make_optimizer(1e-3, 10)
OPTAX = optax.adamw(1e-3)


@pytest.fixture(scope="module")
def params():
    return params_from_hf(CONFIG_T, tensors())


def sample(ids, trained):
    """A sample whose last `trained` tokens are trained."""
    return Sample(np.array(ids, np.int32), np.arange(len(ids)) >= len(ids) - trained)


A, B, EMPTY = concat_rows([sample(R1, 1)]), concat_rows([sample(R2, 6)]), concat_rows([])
BOTH = concat_rows([sample(R1, 1), sample(R2, 6)])


def batch(*rows: Row, shape=SHAPE):
    return make_batch(rows, shape, 8)


@lru_cache
def shared_step(optimizer, mesh, **options):
    """Compiled programs are kept over the tests of this file."""
    return make_sft_step(CONFIG_T, optimizer, mesh, **options)


@lru_cache
def shared_score(devices):
    return make_score_step(CONFIG_T, devices and make_mesh(devices), hits=True)


def run(params, batches, mesh=None, optimizer=SGD, **options):
    """(state after one step, metrics)"""
    step = shared_step(optimizer, mesh, **options)
    state = TrainState.create(jax.device_put(params, replicated(mesh)), optimizer)
    state, metrics = step(state, *batches)
    return jax.device_get(state), {name: float(value) for name, value in metrics.items()}


def assert_close(a, b, rtol=1e-5, atol=1e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)


def test_label_mask(params):
    """Case C01: prompt of two tokens, two trained."""
    _, metrics = run(params, [batch(concat_rows([sample(R1, 2)]))])
    assert metrics["loss"] == pytest.approx(4.488306, abs=1e-4)
    assert metrics["num_terms"] == 2


@pytest.mark.parametrize(("remat", "unroll"), [("matmuls", 1), ("full", 2)])
def test_whole_sequence(params, remat, unroll):
    state, metrics = run(params, [batch(concat_rows([sample(R2, 7)]))], remat=remat, unroll=unroll)
    assert metrics["loss"] == pytest.approx(np.mean(R2_NLL), abs=1e-4)
    reference, _ = run(params, [batch(concat_rows([sample(R2, 7)]))])
    assert_close(state.params, reference.params)


def test_eos_equal_to_pad_is_trained(params):
    """Case C03: lengths, not ids, say what is padding; six targets although pad == eos == 1."""
    row = concat_rows([sample([5, 9, 1], 3), sample([5, 9, 12, 3, 1], 5)])
    _, metrics = run(params, [batch(row)])
    assert metrics["num_terms"] == 6
    assert row.slot_target.tolist() == [9, 1, 9, 12, 3, 1]


NORMALISED = {
    "one batch": ([batch(BOTH)], None),
    "accumulated": ([batch(A), batch(B)], None),
    "accumulated, other shapes": ([batch(A, shape=ShapeClass(8, 4, 4, 1)), batch(B)], None),
    "two devices": ([batch(A, B)], 2),
    "a micro-batch without labels": ([batch(A), batch(EMPTY), batch(B)], None),
    "devices without labels": ([batch(EMPTY, A, EMPTY, B)], 4),
    "accumulated on two devices": ([batch(A, EMPTY), batch(EMPTY, B)], 2),
}


@pytest.fixture(scope="module")
def one_batch(params):
    return run(params, [batch(BOTH)])


@pytest.mark.parametrize("name", NORMALISED)
def test_one_normaliser(params, one_batch, name):
    """Case C09: the same loss and gradient however the labels are spread; a short window (e) is just fewer batches."""
    batches, devices = NORMALISED[name]
    state, metrics = run(params, batches, devices and make_mesh(devices))
    assert metrics["loss"] == pytest.approx(5.424117, abs=1e-5)
    assert_close(state.params, one_batch[0].params, rtol=1e-5)
    for key, value in one_batch[1].items():
        assert metrics[key] == pytest.approx(value, rel=1e-5, abs=1e-6), key


CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1.0, momentum=0.9))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "loss_type", "dtype"),
    [(ADAMW, "nll", "float32"), (CLIPPED, "dft", "bfloat16")],
    ids=["adamw nll", "clipped momentum dft bf16"],
)
def test_devices_equal_one_device(params, optimizer, loss_type, dtype):
    rows = [BOTH, A, B, concat_rows([sample(R2, 3)])]
    options = {"optimizer": optimizer, "loss_type": loss_type, "dtype": jnp.dtype(dtype)}
    one, one_metrics = run(params, [batch(row) for row in rows], **options)
    four, metrics = run(params, [batch(*rows)], make_mesh(4), **options)
    for key, value in one_metrics.items():
        assert metrics[key] == pytest.approx(value, rel=1e-5, abs=1e-6), key
    moments = "mu" if optimizer is ADAMW else "trace"
    assert_close(
        optax.tree_utils.tree_get(four, moments), optax.tree_utils.tree_get(one, moments), rtol=1e-4, atol=1e-6
    )


def test_weights_of_terms(params):
    """Weights that differ, two terms on one slot, and a denominator of its own."""
    row = concat_rows([sample(R2, 7)])
    terms = [0, 3, 3, 6]
    weight = np.array([2.0, 1.0, 0.5, -1.0], np.float32)
    row = row._replace(
        term_slot=np.array(terms, np.int32), term_sample=np.zeros(4, np.int32), weight=weight, denominator=5.0
    )
    _, metrics = run(params, [batch(row)])
    nll = np.array(R2_NLL)[terms]
    assert metrics["loss"] == pytest.approx((weight * nll).sum() / 5, abs=1e-4)
    assert metrics["num_terms"] == 4


def test_packed_row_isolates_documents(params):
    """Cases C10 and C11: the second document's loss is as alone, and nothing is predicted across the boundary."""
    row = concat_rows([sample([5, 9, 12, 3], 4), sample([7, 20, 31, 2], 4)])
    logp, _, _ = shared_score(None)(params, batch(row))
    assert -float(logp[0, 3:6].sum()) == pytest.approx(13.263072, abs=1e-4)
    assert row.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    _, metrics = run(params, [batch(row)])
    assert metrics["num_terms"] == 6
    assert metrics["loss"] == pytest.approx(4.731445, abs=1e-4)


@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=["sgd", "adamw"])
def test_no_trained_token(params, optimizer):
    """Cases C09(d) and C14: a row that is all padding gives zero loss and gradient."""
    state, metrics = run(params, [batch(EMPTY)], optimizer=optimizer)
    assert metrics == {
        "loss": 0,
        "grad_norm": 0,
        "entropy": 0,
        "mean_token_accuracy": 0,
        "num_terms": 0,
        "skipped": 0,
    }
    assert_close(state.params, params, rtol=0, atol=0)


def test_padding_row_beside_a_real_one(params):
    """Case C14: a device whose row is all padding leaves loss and gradient finite."""
    state, metrics = run(params, [batch(BOTH, EMPTY)], make_mesh(2))
    assert metrics["loss"] == pytest.approx(5.424117, abs=1e-5)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))


def test_unused_slots_do_not_matter(params, one_batch):
    """Slots without a term may point at any token and any target."""
    other = batch(BOTH)
    other.slot_index[0, 7:], other.slot_target[0, 7:] = 5, 20
    state, metrics = run(params, [other])
    assert_close(metrics, one_batch[1], rtol=1e-6)
    assert_close(state.params, one_batch[0].params, rtol=1e-6)


@pytest.mark.parametrize(
    ("optimizer", "accumulate"), [(ADAMW, False), (ADAMW, True), (OPTAX, False)], ids=["adamw", "accumulated", "optax"]
)
def test_step_that_is_not_finite_is_skipped(params, optimizer, accumulate):
    step = shared_step(optimizer, None, donate=False)
    state, _ = step(TrainState.create(params, optimizer), batch(BOTH))
    bad = batch(BOTH)
    bad.weight[0, 0] = np.inf
    after, metrics = step(state, *([batch(A), bad] if accumulate else [bad]))
    assert metrics["skipped"] == 1
    jax.tree.map(np.testing.assert_array_equal, after, state)
    again, metrics = step(after, batch(BOTH))
    assert metrics["skipped"] == 0
    assert int(again.step) == 2


@pytest.mark.parametrize("optimizer", [ADAMW, OPTAX], ids=["adamw", "optax adamw"])
def test_fused_equals_accumulate_and_apply(params, optimizer):
    step = shared_step(optimizer, None, donate=False)
    state = TrainState.create(params, optimizer)
    fused, fused_metrics = step.fused(state, batch(BOTH))
    acc = step.accumulate(state.params, step.init(state.params), batch(BOTH))
    parts, parts_metrics = step.apply(state, acc)
    assert_close(parts, fused, rtol=1e-6, atol=1e-7)
    assert_close(parts_metrics, fused_metrics, rtol=1e-6, atol=1e-7)


def test_steps_are_pure(params):
    """The same state and batch give the same bits, also after other steps; a run goes on from a copied state."""
    step = shared_step(ADAMW, None, donate=False)
    start = TrainState.create(params, ADAMW)
    first, _ = step(start, batch(A))
    copied = jax.tree.map(jnp.array, jax.device_get(first))
    second, _ = step(first, batch(B), batch(A))
    again, _ = step(copied, batch(B), batch(A))
    jax.tree.map(np.testing.assert_array_equal, second, again)


@pytest.mark.parametrize("donate", [True, False])
def test_donation(params, donate):
    step = shared_step(ADAMW, None, **({} if donate else {"donate": False}))
    state = TrainState.create(params, ADAMW)
    step.fused(state, batch(BOTH))
    assert state.params["embed_tokens"].is_deleted() == donate
    state = TrainState.create(params, ADAMW)
    acc = step.init(state.params)
    acc2 = step.accumulate(state.params, acc, batch(A))
    assert acc.gradients["embed_tokens"].is_deleted() == donate
    assert not state.params["embed_tokens"].is_deleted()
    step.apply(state, acc2)
    assert state.params["embed_tokens"].is_deleted() == donate


def test_grad_norm_is_before_clipping(params):
    _, clipped = run(params, [batch(BOTH)], optimizer=make_optimizer(1e-3, 10, max_grad_norm=0.1))
    state, plain = run(params, [batch(BOTH)])
    assert clipped["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-6)
    gradient = jax.tree.map(lambda old, new: np.asarray(old) - new, params, state.params)
    assert plain["grad_norm"] == pytest.approx(float(global_norm(jax.tree.map(jnp.asarray, gradient))), rel=1e-4)


def test_bf16_compute_keeps_float32_state(params):
    state, metrics = run(params, [batch(BOTH)], optimizer=ADAMW, dtype=jnp.bfloat16)
    assert metrics["loss"] == pytest.approx(5.424117, abs=0.05)
    floats = {leaf.dtype for leaf in jax.tree.leaves((state.params, state.opt_state.mu, state.opt_state.nu))}
    assert floats == {np.dtype(np.float32)}


def test_untied_head():
    config = Qwen3Config.from_dict(CONFIG | {"tie_word_embeddings": False})
    params = params_from_hf(config, tensors(tie=False))
    state, metrics = TrainState.create(params, SGD), None
    state, metrics = make_sft_step(config, SGD)(state, batch(concat_rows([sample(R2, 7)])))
    assert float(metrics["loss"]) == pytest.approx(32.045619 / 7, abs=1e-4)
    assert np.any(np.asarray(state.params["lm_head"]) != np.asarray(params["lm_head"]))


def test_tied_gradient_has_both_parts(params):
    """Against autodiff through plain log-softmax with one shared table, in the same model."""
    from flax import nnx

    from jaxtrl.model.qwen3 import model_graphdef

    data = jax.tree.map(lambda x: jnp.asarray(x[0]), batch(concat_rows([sample(R2, 7)])))

    def loss(params):
        model = nnx.merge(model_graphdef(CONFIG_T), params)
        hidden = model(data.input_ids, data.position_ids, data.visible_until, data.tables)[data.slot_index[:7]]
        log_p = jax.nn.log_softmax(hidden @ model.head_weight().T)
        return -log_p[jnp.arange(7), data.slot_target[:7]].mean()

    want = jax.jit(jax.grad(loss))(params)
    state, _ = run(params, [batch(concat_rows([sample(R2, 7)]))])
    assert_close(jax.tree.map(lambda old, new: np.asarray(old) - new, params, state.params), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mesh", [None, 2])
def test_eval_sums(params, mesh):
    evaluate = make_eval_step(CONFIG_T, mesh and make_mesh(mesh))
    rows = [batch(A, B)] if mesh else [batch(A), batch(B)]
    sums = [jax.device_get(evaluate(params, rows_)) for rows_ in rows]
    total = {name: sum(float(part[name]) for part in sums) for name in sums[0]}
    assert total["loss_sum"] / total["denominator"] == pytest.approx(5.424117, abs=1e-5)
    assert total["denominator"] == total["num_terms"] == 7
    _, metrics = run(params, [batch(BOTH)])
    assert total["entropy_sum"] / 7 == pytest.approx(metrics["entropy"], rel=1e-5)
    assert total["hit_sum"] == metrics["mean_token_accuracy"] * 7


def test_eval_dft(params):
    sums = make_eval_step(CONFIG_T, loss_type="dft")(params, batch(concat_rows([sample(R2, 7)])))
    want = np.sum(np.exp(-np.array(R2_NLL)) * R2_NLL)
    assert float(sums["loss_sum"]) == pytest.approx(want, rel=1e-4)
    _, metrics = run(params, [batch(concat_rows([sample(R2, 7)]))], loss_type="dft")
    assert metrics["loss"] == pytest.approx(want / 7, rel=1e-4)


@pytest.mark.parametrize("mesh", [None, 2])
def test_score(params, mesh):
    score = shared_score(mesh)
    rows = [concat_rows([sample(R1, 3)]), concat_rows([sample(R2, 7)])][: mesh or 1]
    logp, entropy, hit = score(params, batch(*rows))
    assert logp.shape == entropy.shape == hit.shape == (mesh or 1, 16)
    np.testing.assert_allclose(-logp[0, :3], R1_NLL, atol=1e-4)
    assert (np.asarray(entropy) > 0).all()
    if mesh:
        np.testing.assert_allclose(-logp[1, :7], R2_NLL, atol=1e-4)


def test_accuracy_counts_hits(params):
    _, _, hit = shared_score(None)(params, batch(concat_rows([sample(R1, 3)])))
    first = int(np.asarray(hit)[0, :3].sum())
    _, metrics = run(params, [batch(concat_rows([sample(R1, 3)]))])
    assert metrics["mean_token_accuracy"] * 3 == pytest.approx(first)
    greedy = [5, 9, 12, 10]  # fixture T continues 5 9 12 with 10 (case C21)
    _, metrics = run(params, [batch(concat_rows([sample(greedy, 1)]))])
    assert metrics["mean_token_accuracy"] == 1


def test_temperature_of_scores(params):
    """Case C22(b): prompt 5 9 12, completion 3 7, temperature 0.5."""
    row = concat_rows([sample([5, 9, 12, 3, 7], 2)])
    logp, _ = make_score_step(CONFIG_T, temperature=0.5)(params, batch(row))
    np.testing.assert_allclose(logp[0, :2], [-6.060610, -6.959415], atol=1e-4)


def test_refusals(params):
    step = make_sft_step(CONFIG_T, SGD)
    state = TrainState.create(params, SGD)
    with pytest.raises(ValueError, match="the batch has 2 rows for 1 data-parallel devices"):
        step(state, batch(A, B))
    with pytest.raises(ValueError, match="a step needs at least one batch"):
        step(state)
    with pytest.raises(ValueError, match="loss_type is 'x': use one of nll, dft"):
        make_sft_step(CONFIG_T, SGD, loss_type="x")
    with pytest.raises(ValueError, match="the batch has 1 rows for 2 data-parallel devices"):
        make_eval_step(CONFIG_T, make_mesh(2))(params, batch(A))


def test_lanes_left_out_on_a_cpu_change_no_bit(params):
    """Visited blocks are the needed ones; the sums of two devices, whose rows need different numbers, are the same."""
    mesh = make_mesh(2)
    padded = batch(BOTH, A, shape=SHAPE._replace(lanes=9))
    counted = skip_lanes(padded)
    needed = sum(needed_blocks(row, 8) for row in padded.visible_until)
    assert visited_blocks(counted.tables) == needed < visited_blocks(padded.tables)
    assert [leaf.shape for leaf in jax.tree.leaves(counted)] == [leaf.shape for leaf in jax.tree.leaves(padded)]
    step = shared_step(SGD, mesh)
    results = []
    for one in (padded, counted):
        acc = step.init(jax.device_put(params, replicated(mesh)))
        results.append(jax.device_get(step.accumulate(jax.device_put(params, replicated(mesh)), acc, one)))
    for x, y in zip(*map(jax.tree.leaves, results), strict=True):
        assert x.tobytes() == y.tobytes()
