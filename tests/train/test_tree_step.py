"""Tree rows through the whole model against the same samples one by one: losses, log-probs, gradients.

Every program is compiled once, for a packed batch, and called as that executable: tree rows need no other.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxtrl.hardware.neuron import lint
from jaxtrl.model.config import Qwen3Config
from jaxtrl.model.hf import params_from_hf
from jaxtrl.rows.batch import TERM_COLUMNS, Row, RowBatch, Sample, ShapeClass, concat_rows, make_batch
from jaxtrl.rows.blocks import DEFAULT_BLOCK_SIZE
from jaxtrl.rows.tree import tree_row, tree_rows
from jaxtrl.train.mesh import make_mesh
from jaxtrl.train.state import TrainState
from jaxtrl.train.step import Accumulated, make_eval_step, make_score_step, make_sft_step
from tests.fixture_t import CONFIG, tensors
from tests.rows.test_tree import forests

SHAPE = ShapeClass(104, 96, 96, 78)  # holds 10 samples of 10 tokens, whatever they share; 13 blocks of 8
WIDE = ShapeClass(768, 384, 448, 15)  # blocks of the default size
SGD = optax.sgd(1.0)
FEW = settings(max_examples=25)
TRIES = forests(columns=st.just(True))


def config(tied: bool) -> Qwen3Config:
    return Qwen3Config.from_dict(CONFIG | {"tie_word_embeddings": tied})


def batch(*rows: Row, shape: ShapeClass = SHAPE) -> RowBatch:
    return make_batch(rows, shape, DEFAULT_BLOCK_SIZE if shape is WIDE else 8)


def sample(ids, trained, advantage=1.0, seed=0) -> Sample:
    """The last `trained` tokens are trained."""
    old_logp = np.random.default_rng(seed).normal(size=len(ids)).astype(np.float32)
    return Sample(np.array(ids, np.int32), np.arange(len(ids)) >= len(ids) - trained, advantage, old_logp)


C30 = [sample([5, 9, 12, *c], len(c)) for c in ([3, 7, 1], [3, 20, 11, 4], [8, 2, 6])]
C30_LOGP = [
    [-4.605965, -5.312547, -4.274724],
    [-4.605965, -3.044685, -5.604728, -4.755763],
    [-4.611031, -4.395921, -2.847103],
]
# A fork at each of eight depths, twice the same sample, one that is a prefix of others, one without a trained token.
COMB = [sample([*range(20, 20 + depth), 3 + depth, 7], depth, (-1) ** depth * depth, depth) for depth in range(1, 9)]
COMB += [COMB[4]._replace(advantage=0.5), sample([20, 21, 22], 2, -3.0), sample([20, 21, 60, 61], 0)]


class Programs(NamedTuple):
    """Compiled for the shapes of a packed batch."""

    step: Any
    params: Any
    start: Accumulated
    accumulate: Any
    score: Any


@lru_cache
def programs(tied: bool = True, loss_type: str = "nll", devices: int | None = None, shape=SHAPE) -> Programs:
    mesh = devices and make_mesh(devices)
    params = params_from_hf(config(tied), tensors(tied))
    step, score = (
        make_sft_step(config(tied), SGD, mesh, loss_type=loss_type, donate=False),
        make_score_step(config(tied)),
    )
    start = step.init(params)
    packed = batch(*[supervised(concat_rows(C30))] * (devices or 1), shape=shape)
    accumulate = step.accumulate.lower(params, start, packed).compile()
    return Programs(step, params, start, accumulate, None if devices else score.lower(params, packed).compile())


KINDS = pytest.mark.parametrize(("tied", "loss_type"), [(True, "nll"), (False, "dft")], ids=["tied nll", "untied dft"])


def supervised(row: Row, signed: bool = False) -> Row:
    """As the SFT step takes it; signed: each term weighted by what its sample and its token carry, of both signs."""
    weight = row.weight
    if signed and len(weight):
        weight = row.advantage * (1 + row.old_logp / 4)
    return row._replace(weight=weight, **dict.fromkeys(TERM_COLUMNS))


def gradients(run: Programs, *batches: RowBatch) -> Accumulated:
    acc = run.start
    for one in batches:
        acc = run.accumulate(run.params, acc, one)
    return jax.tree.map(lambda x: np.asarray(x, np.float64), jax.device_get(acc))


def separate(run: Programs, samples: list[Sample], signed: bool, shape=SHAPE) -> tuple[Accumulated, Accumulated]:
    """Each sample in a row of its own: the sum, and the sum of the norms of each parameter's gradient (and of sums)."""
    parts = [gradients(run, batch(supervised(concat_rows([s]), signed), shape=shape)) for s in samples]
    zeros = gradients(run)
    return jax.tree.map(lambda *x: sum(x), zeros, *parts), jax.tree.map(lambda *x: sum(map(norm, x)), zeros, *parts)


def norm(x) -> float:
    return float(np.sqrt((x**2).sum()))


def assert_same(got: Accumulated, want: Accumulated, scale: Accumulated) -> None:
    """1e-5 of the norms of what is summed (samples may cancel each other), and entry by entry a fifth of it.

    Where a token sees only itself the gradients of queries and keys are 0 but for rounding: 2 in the last place of the
    whole gradient.
    """
    rounding = 2**-22 * sum(jax.tree.leaves(scale.gradients))

    def compare(path, x, y, size):
        name = jax.tree_util.keystr(path)
        assert norm(x - y) <= 1e-5 * size + rounding, f"{name}: off by {norm(x - y)}, scale {size}"
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-6 * size + rounding, err_msg=name)

    jax.tree_util.tree_map_with_path(compare, got, want, scale)
    assert got.sums[1:2] + got.sums[3:] == want.sums[1:2] + want.sums[3:]  # denominator, hits, terms


@KINDS
@FEW
@given(samples=TRIES, signed=st.booleans())
@example(samples=COMB, signed=True)
@example(samples=COMB, signed=False)
@example(samples=C30, signed=False)
@example(samples=[COMB[4]] * 3 + [COMB[4]._replace(advantage=-15.0)], signed=True)  # cancels: all gradients are 0
def test_loss_and_every_gradient_equal_those_of_separate_rows(tied, loss_type, samples, signed):
    run = programs(tied, loss_type)
    want, scale = separate(run, samples, signed)
    if not signed:
        scale = jax.tree.map(norm, want)
    assert_same(gradients(run, batch(supervised(tree_row(samples), signed))), want, scale)
    assert_same(gradients(run, batch(supervised(concat_rows(samples), signed))), want, scale)


@pytest.mark.parametrize("tied", [True, False])
@FEW
@given(samples=TRIES)
@example(samples=COMB)
def test_every_log_prob_and_entropy_equals_that_of_separate_rows(tied, samples):
    run = programs(tied, "nll" if tied else "dft")
    row = tree_row(samples)
    logp, entropy = (np.asarray(x)[0] for x in run.score(run.params, batch(supervised(row))))
    for number, s in enumerate(samples):
        (mine,) = np.nonzero(row.term_sample == number)
        slots = row.term_slot[mine]
        (trained,) = np.nonzero(s.loss_mask[1:])
        assert row.slot_target[slots].tolist() == s.input_ids[1:][trained].tolist()
        assert row.position_ids[row.slot_index[slots]].tolist() == trained.tolist()
        alone = run.score(run.params, batch(supervised(concat_rows([s]))))
        for got, want in zip((logp, entropy), alone, strict=True):
            np.testing.assert_allclose(got[mine], want[0, : len(mine)], rtol=1e-5, atol=1e-6)


def c30_log_probs(**faults) -> list[list[float]]:
    run, row = programs(), supervised(tree_row(C30))._replace(**faults)
    logp = np.asarray(run.score(run.params, batch(row))[0][0])
    return [logp[: len(row.term_slot)][row.term_sample == number].tolist() for number in range(3)]


def test_c30():
    """Case C30: three completions of one prompt, 12 tokens where 19 would stand."""
    assert len(tree_row(C30).input_ids) == 12
    for got, want in zip(c30_log_probs(), C30_LOGP, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4)
    run, separated = programs(), separate(programs(), C30, signed=False)
    assert_same(gradients(run, batch(supervised(tree_row(C30)))), *separated)
    assert separated[0].sums.loss == pytest.approx(14.193237 + 18.011141 + 11.854054, abs=1e-4)


def test_c30_tells_the_known_faults():
    """The wrong values of case C30 come from planting its faults, so the right ones would not survive them."""
    row = tree_row(C30)
    flat = [sum(x) for x in c30_log_probs(position_ids=np.arange(12, dtype=np.int32))]
    np.testing.assert_allclose(flat, [-14.193237, -18.059846, -11.251028], atol=1e-4)
    unmasked = [sum(x) for x in c30_log_probs(visible_until=np.full(12, 12, np.int32))]
    np.testing.assert_allclose(unmasked, [-14.193237, -17.851166, -13.086887], atol=1e-4)
    first_of_c = int(row.term_slot[7])
    before = row.slot_index.copy()
    before[first_of_c] = 8  # the token packed before it
    assert abs(c30_log_probs(slot_index=before)[2][0] - C30_LOGP[2][0]) > 0.1


@FEW
@given(samples=TRIES, budget=st.integers(10, 60), signed=st.booleans())
@example(samples=COMB, budget=20, signed=True)
def test_several_tree_rows_on_one_device_and_on_two(samples, budget, signed):
    """However the samples are spread over tree rows: accumulated one by one, or one row for each of two devices."""
    one, two = programs(), programs(devices=2)
    rows = [supervised(row, signed) for row in tree_rows(samples, budget, block_size=8)]
    want, scale = separate(one, samples, signed)
    assert_same(gradients(one, *map(batch, rows)), want, scale)
    rows += [concat_rows([])] * (len(rows) % 2)
    pairs = [batch(*pair) for pair in zip(rows[::2], rows[1::2], strict=True)]
    assert_same(gradients(two, *pairs), want, scale)


def test_one_normaliser_for_all_tree_rows():
    """After accumulation over two tree rows the applied step is that of one row, and of the samples one by one."""
    run = programs()
    state = TrainState.create(run.params, SGD)
    rows = [[tree_row(COMB)], [tree_row(COMB[:3]), tree_row(COMB[3:])], [concat_rows([s]) for s in COMB]]
    results = []
    for kind in rows:
        acc = run.start
        for row in kind:
            acc = run.accumulate(run.params, acc, batch(supervised(row, signed=True)))
        results.append(run.step.apply(state, acc))
    terms = sum(int(s.loss_mask[1:].sum()) for s in COMB)
    want = separate(run, COMB, signed=True)[0]
    for after, metrics in results:
        assert metrics["num_terms"] == terms
        assert float(metrics["loss"]) == pytest.approx(want.sums.loss / terms, rel=1e-5)
        for x, y, g in zip(*map(jax.tree.leaves, (after.params, run.params, want.gradients)), strict=True):
            np.testing.assert_allclose(np.float64(x) - y, -g / terms, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("signed", [False, True])
def test_blocks_of_the_default_size(signed):
    """Two prompts, two continuations each that fork again where they are trained; 5 blocks of 128 and padding."""
    draw = np.random.default_rng(0)
    samples = []
    for length in (150, 90):
        prompt = draw.integers(2, 64, length).tolist()
        for _ in range(2):
            stem = prompt + draw.integers(2, 64, 12).tolist()
            for _ in range(2):
                more = draw.integers(2, 64, draw.integers(20, 60)).tolist()
                samples.append(sample(stem + more, 6 + len(more), draw.normal(), len(samples)))
    run = programs(shape=WIDE)
    row = tree_row(samples)
    assert 512 < len(row.input_ids) < 640 < sum(len(s.input_ids) for s in samples) / 2
    want, scale = separate(run, samples, signed, WIDE)
    assert_same(gradients(run, batch(supervised(row, signed), shape=WIDE)), want, scale)


@FEW
@given(samples=TRIES, seed=st.integers(0, 2**31))
@example(samples=COMB, seed=0)
def test_a_branch_without_terms_changes_no_bit_of_the_gradient(samples, seed):
    """The tokens below a fork are replaced where no term of theirs is used: its siblings are trained as before."""
    run, draw = programs(), np.random.default_rng(seed)
    row = supervised(tree_row(samples))
    if not len(row.input_ids):
        return
    start = int(draw.integers(len(row.input_ids)))
    end = int(row.visible_until[start])
    below = (row.slot_index >= start) & (row.slot_index < end)
    row = row._replace(weight=np.where(below[row.term_slot], np.float32(0), row.weight))
    other = row.input_ids.copy()
    other[start:end] = draw.integers(0, 64, end - start)
    before, after = (gradients(run, batch(x)) for x in (row, row._replace(input_ids=other)))
    jax.tree.map(np.testing.assert_array_equal, before, after)


@given(samples=TRIES, budget=st.integers(10, 60))
def test_tree_and_packed_batches_of_a_class_have_one_signature(samples, budget):
    def signature(row):
        leaves, structure = jax.tree.flatten(batch(row))
        return structure, [(x.shape, x.dtype) for x in leaves]

    packed = signature(concat_rows(C30)._replace(ref_logp=np.zeros(10, np.float32)))
    assert all(signature(row) == packed for row in tree_rows(samples, budget, block_size=8))


def test_an_executable_takes_its_class_only():
    """So that the calls of this module show that tree rows run the program that was compiled for packed rows."""
    run, shape = programs(), SHAPE._replace(terms=95)
    with pytest.raises(TypeError, match="compiled"):
        run.accumulate(run.params, run.start, batch(supervised(tree_row(C30)), shape=shape))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("devices", [None, 2])
def test_programs_of_tree_batches_are_clean(devices, dtype):
    """Nothing that Neuron does not run in the train, evaluation and score steps of a tree batch."""
    mesh, params = devices and make_mesh(devices), programs().params
    step = make_sft_step(config(True), SGD, mesh, dtype=dtype)
    rows = batch(*[supervised(tree_row(COMB), signed=True)] * (devices or 1))
    assert lint(step.fused, TrainState.create(params, SGD), rows) == []
    assert lint(step.accumulate, params, programs().start, rows) == []
    for make in (make_eval_step, make_score_step):
        assert lint(make(config(True), mesh, dtype=dtype), params, rows) == []
