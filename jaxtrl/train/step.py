"""Pure step functions: train, evaluate, score (DESIGN.md sections 3, 6 and 7).

`jax.shard_map` covers loss and gradient, one token row per device; what leaves it are sums over all devices. The
optimizer runs outside, on global arrays. Sums are divided by the denominator once per optimizer step.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from jaxtrl.model.config import Qwen3Config
from jaxtrl.model.qwen3 import model_graphdef
from jaxtrl.model.sharding import Shards, param_specs, vary, varying_axes
from jaxtrl.rows.batch import RowBatch
from jaxtrl.rows.blocks import CountedTables
from jaxtrl.train.head import Score, score
from jaxtrl.train.losses import sum_by_slot, supervised_loss
from jaxtrl.train.mesh import REPLICATED, ROWS, replicated, row_count, shards_of
from jaxtrl.train.optimizer import SkippingOptimizer, global_norm
from jaxtrl.train.state import TrainState, state_shardings

Metrics = dict[str, Array]


class Sums(NamedTuple):
    """Sums over trained terms of any number of micro-batches; float32 scalars and gradients of `loss`."""

    loss: Float[Array, ""]  # weighted
    denominator: Float[Array, ""]
    entropy: Float[Array, ""]
    hits: Float[Array, ""]
    terms: Float[Array, ""]


class Accumulated(NamedTuple):
    """What `accumulate` adds to: the gradients of the summed loss, and the sums (`Sums`, or those of another step).

    `peaks` are maxima instead of sums: a named tuple of float32 scalars, or none.
    """

    gradients: Any
    sums: Any
    peaks: Any = ()


def skip_lanes(batch: RowBatch) -> RowBatch:
    """On a CPU the same batch with `CountedTables`, so that padding lanes take no time; elsewhere as it is.

    Results are the same bit for bit. Neuron has no loop with a computed end, and a GPU would ask the host at each step.
    """
    if jax.default_backend() != "cpu":
        return batch
    return batch._replace(tables=CountedTables(*batch.tables))


class TrainStep:
    """One optimizer step, of supervised fine-tuning (`make_sft_step`) or of GRPO (`train.grpo.make_grpo_step`).

    `step(state, *batches) -> state, metrics` is `fused(state, batch)` for one batch, and for more `init(params)`, then
    `accumulate(params, acc, batch)` for each, then `apply(state, acc)`. These four are jax.jit objects, to be lowered
    or compiled ahead.
    """

    def __init__(self, init: Callable, accumulate: Any, apply: Any, fused: Any):
        self.init, self.accumulate, self.apply, self.fused = init, accumulate, apply, fused

    def __call__(self, state: TrainState, *batches: RowBatch) -> tuple[TrainState, Metrics]:
        if not batches:
            raise ValueError("a step needs at least one batch: give the micro-batches after the state")
        if len(batches) == 1:
            return self.fused(state, batches[0])
        acc = self.init(state.params)
        for batch in batches:
            acc = self.accumulate(state.params, acc, batch)
        return self.apply(state, acc)


def make_sft_step(
    config: Qwen3Config,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | None = None,
    *,
    loss_type: str = "nll",
    dtype: DTypeLike = jnp.float32,
    remat: str = "full",
    unroll: int = 1,
    donate: bool = True,
) -> TrainStep:
    """A pure step on `TrainState` and `RowBatch`es (of one row per device of `mesh`; their shapes may differ).

    The loss is sum(weight * l) / sum(denominator) over all batches and devices, l being "nll" or "dft". Metrics are
    float32 scalars: loss, grad_norm (before clipping), entropy and mean_token_accuracy (over trained terms),
    num_terms, and skipped: 1 where loss or gradient were not finite, in which case the state comes back as it was. No
    trained term gives zero loss and gradient. `dtype` is that of the matmuls, parameters and sums stay float32. With
    `donate` the buffers of the state given to `fused` and `apply`, and of the `acc` given to `accumulate`, are reused
    and must not be read again.
    """
    gradients = _make_gradients(config, loss_type, dtype, remat, unroll)
    return make_train_step(config, gradients, Sums, lambda acc: _metrics(acc.sums), optimizer, mesh, donate)


def make_train_step(
    config: Qwen3Config,
    gradients: Callable[[Any, RowBatch], Accumulated],
    sums: Any,
    metrics: Callable[[Accumulated], Metrics],
    optimizer: optax.GradientTransformation,
    mesh: Mesh | None,
    donate: bool,
    peaks: Callable[[], Any] = tuple,
) -> TrainStep:
    """The step that adds up what `gradients(params, batch of one row)` gives over devices and batches, then applies it.

    `sums` is a named tuple of float32 scalars, `loss` and `denominator` among them; `peaks()` are those of no term, of
    which the largest count. `metrics(accumulated)` are reported beside loss, grad_norm and skipped. Raises ValueError
    where the mesh cannot cut a model of `config`.
    """
    shards_of(mesh).check(config)
    gradients = sharded(gradients, mesh, "gradients")
    whole, state = replicated(mesh), state_shardings(config, optimizer, mesh)
    accumulated = None if state is None else Accumulated(state.params, whole, whole)

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return Accumulated(zeros, sums(*(jnp.zeros((), jnp.float32) for _ in sums._fields)), peaks())

    def accumulate(params: Any, acc: Accumulated, batch: RowBatch) -> Accumulated:
        new = gradients(params, batch)
        added = jax.tree.map(jnp.add, acc._replace(peaks=()), new._replace(peaks=()))
        return added._replace(peaks=jax.tree.map(jnp.maximum, acc.peaks, new.peaks))

    def apply(state: TrainState, acc: Accumulated) -> tuple[TrainState, Metrics]:
        return _apply(optimizer, state, acc, metrics)

    def fused(state: TrainState, batch: RowBatch) -> tuple[TrainState, Metrics]:
        return _apply(optimizer, state, gradients(state.params, batch), metrics)

    def jit(function, out, *donated):
        return jax.jit(function, donate_argnums=donated if donate else (), out_shardings=out)

    stepped = None if mesh is None else (state, whole)
    return TrainStep(
        jit(init, accumulated), jit(accumulate, accumulated, 1), jit(apply, stepped, 0), jit(fused, stepped, 0)
    )


def make_eval_step(
    config: Qwen3Config,
    mesh: Mesh | None = None,
    *,
    loss_type: str = "nll",
    dtype: DTypeLike = jnp.float32,
    unroll: int = 1,
) -> Any:
    """jitted eval(params, batch) -> dict of sums over the trained terms of all devices, float32 scalars.

    Keys: loss_sum (weighted), denominator, entropy_sum, hit_sum, num_terms. Add those of several batches, then divide.
    """
    shards_of(mesh).check(config)
    loss = supervised_loss(loss_type)

    def evaluate(params: Any, batch: RowBatch) -> Sums:
        row = own_row(batch)
        weights, counts, used = slot_weights(row)
        scored = score_row(config, params, row, used, dtype, "full", unroll)
        total = jnp.where(weights != 0, weights * loss.value(scored.logp), 0.0).sum()
        return _sums(total, row, counts, scored)

    names = ("loss_sum", "denominator", "entropy_sum", "hit_sum", "num_terms")
    evaluate_all = sharded(evaluate, mesh)
    return jax.jit(lambda params, batch: dict(zip(names, evaluate_all(params, batch), strict=True)))


def make_score_step(
    config: Qwen3Config,
    mesh: Mesh | None = None,
    *,
    dtype: DTypeLike = jnp.float32,
    temperature: float = 1.0,
    hits: bool = False,
    unroll: int = 1,
) -> Any:
    """jitted score(params, batch) -> (logp [D, T], entropy [D, T]) of each term, float32; with `hits` a third bool
    array: is the target the most likely token. Entries of unused terms (weight 0) mean nothing."""
    shards_of(mesh).check(config)

    def terms(params: Any, batch: RowBatch) -> tuple[Array, ...]:
        row = own_row(batch)
        scored = score_row(config, params, row, None, dtype, "full", unroll, temperature)
        columns = (scored.logp, scored.entropy, *([scored.hit] if hits else []))
        return tuple(column[row.term_slot][None] for column in columns)

    return jax.jit(sharded(terms, mesh, "rows"))


def _make_gradients(config, loss_type, dtype, remat, unroll):
    """(params, batch of one row) -> Accumulated of that row."""
    loss = supervised_loss(loss_type)
    own = loss.slope
    slope = None if own is None else lambda logp, cotangent: cotangent * own(logp)

    def gradients(params: Any, batch: RowBatch) -> Accumulated:
        row = own_row(batch)
        weights, counts, used = slot_weights(row)

        def total(params):
            scored = score_row(config, params, row, used, dtype, remat, unroll, cotangent=-weights, slope=slope)
            return scored.total, scored

        (value, scored), grads = jax.value_and_grad(total, has_aux=True)(params)
        return Accumulated(grads, _sums(value, row, counts, scored))

    return gradients


def own_row(batch: RowBatch) -> Any:
    """The one row that this device holds: a RowBatch of traced arrays without the leading axis."""
    return jax.tree.map(lambda x: x[0], batch)


def slot_weights(row: Any) -> tuple[Float[Array, "u"], Float[Array, "u"], Bool[Array, "u"]]:
    """Of each slot: the summed weight of its terms, their number, and whether it has any."""
    columns = jnp.stack([row.weight, (row.weight != 0).astype(jnp.float32)], axis=1)
    weights, counts = sum_by_slot(columns, row.term_slot, row.slot_index.shape[0]).T
    return weights, counts, counts > 0


def score_row(config, params, row, used, dtype, remat, unroll, temperature=1.0, cotangent=None, slope=None) -> Score:
    """Scores of the row's slots. Those not `used` get a zero hidden state, so that nothing comes back from them."""
    model, shards = nnx.merge(model_graphdef(config), params), Shards.of(config, params)
    hidden = model(
        row.input_ids,
        row.position_ids,
        row.visible_until,
        row.tables,
        dtype=dtype,
        remat=remat,
        unroll=unroll,
        shards=shards,
    )[row.slot_index]
    if used is not None:
        hidden = jnp.where(used[:, None], hidden, 0)
    return score(hidden, model.head_weight(), row.slot_target, temperature, cotangent, slope, shards=shards)


def _sums(loss: Array, row: Any, counts: Array, scored: Score) -> Sums:
    entropy = jnp.where(counts > 0, counts * scored.entropy, 0.0).sum()
    return Sums(loss, row.denominator, entropy, (counts * scored.hit).sum(), counts.sum())


def _metrics(sums: Sums) -> Metrics:
    terms = jnp.maximum(sums.terms, 1.0)
    return {"entropy": sums.entropy / terms, "mean_token_accuracy": sums.hits / terms, "num_terms": sums.terms}


def _apply(optimizer, state: TrainState, acc: Accumulated, metrics_of) -> tuple[TrainState, Metrics]:
    """Divide, update, and keep the old state where loss or gradient are not finite."""
    sums = acc.sums
    scale = jnp.where(sums.denominator > 0, 1.0 / jnp.where(sums.denominator > 0, sums.denominator, 1.0), 0.0)
    loss, norm = sums.loss * scale, global_norm(acc.gradients) * scale
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    grads = jax.tree.map(lambda g: g * scale, acc.gradients)
    if isinstance(optimizer, SkippingOptimizer):
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params, finite=finite, grad_norm=norm)
        params = optax.apply_updates(state.params, updates)
    else:
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        keep = lambda new, old: jnp.where(finite, new, old)  # noqa: E731
        params, opt_state = jax.tree.map(keep, (params, opt_state), (state.params, state.opt_state))
    skipped = 1.0 - finite.astype(jnp.float32)
    metrics = {"loss": loss, "grad_norm": norm, **metrics_of(acc), "skipped": skipped}
    return TrainState(state.step + finite.astype(jnp.int32), params, opt_state), metrics


def sharded(function: Callable, mesh: Mesh | None, result: str = "sums") -> Callable:
    """`function(params, batch)` on each device's row and part of the parameters.

    `result` says what it returns: "sums" are added up over the rows, "rows" are stacked, and of "gradients" (an
    `Accumulated`) those of cut parameters stay as these are cut.
    """
    devices = row_count(mesh)

    def run(params, batch):
        if (rows := batch.input_ids.shape[0]) != devices:
            raise ValueError(f"the batch has {rows} rows for {devices} data-parallel devices: give one row per device")
        if mesh is None:
            return function(params, batch)
        specs = param_specs(params, shards_of(mesh))
        out = {"sums": REPLICATED, "rows": ROWS, "gradients": Accumulated(specs, REPLICATED, REPLICATED)}[result]
        return jax.shard_map(on_device, mesh=mesh, in_specs=(specs, ROWS), out_specs=out)(params, batch)

    def on_device(params, batch):
        axes = varying_axes(batch)
        # Cast once, here: where a replicated weight meets a device's tokens JAX would sum its gradient on the spot,
        # in every step of the layer loop. This way there is one sum of everything at the end.
        out = function(vary(params, axes), batch)
        if result == "rows":
            return out
        return lax.psum(out, tuple(sorted(axes))) if result == "sums" else _sum_gradients(out, params, axes)

    return run


def _sum_gradients(out: Accumulated, params: Any, axes: frozenset[str]) -> Accumulated:
    """Sums (and peaks) over the rows. Gathering cut parameters has a gradient that is added up over "fsdp" already."""
    cut = ["fsdp" in varying_axes(param) for param in jax.tree.leaves(params)]
    leaves, structure = jax.tree.flatten(out.gradients)
    rest = [leaf for leaf, is_cut in zip(leaves, cut, strict=True) if not is_cut]
    rest, sums = lax.psum((rest, out.sums), tuple(sorted(axes)))
    peaks = lax.pmax(out.peaks, tuple(sorted(axes)))
    parts = [leaf for leaf, is_cut in zip(leaves, cut, strict=True) if is_cut]
    parts = lax.psum(parts, tuple(sorted(axes - {"fsdp"}))) if parts else []
    both = iter(parts), iter(rest)
    return Accumulated(jax.tree.unflatten(structure, [next(both[not is_cut]) for is_cut in cut]), sums, peaks)
