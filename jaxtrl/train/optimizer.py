"""AdamW with the defaults and the learning-rate schedules of Transformers, as optax transformations."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Float


class SkippingOptimizer(optax.GradientTransformationExtraArgs):
    """An optax transformation whose `update` takes `finite` (bool scalar) and `grad_norm` (of the gradients).

    Where `finite` is False the updates are zero and the state stays as it is. A caller can do the same to any
    optimizer by `where(finite, new, old)`, but then XLA on CPU copies the moments, since their old values are needed
    to the end.
    """


def make_optimizer(
    learning_rate: float | optax.Schedule,
    total_steps: int,
    *,
    schedule: str = "linear",
    warmup_steps: int = 0,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    max_grad_norm: float | None = 1.0,
    decay_mask: Any = None,
    **options: Any,
) -> SkippingOptimizer:
    """AdamW (https://arxiv.org/abs/1711.05101) after clipping by the global norm; TRL's defaults.

    `learning_rate` is the peak of `schedule` (see `make_schedule`, which gets `options`) or an optax schedule of its
    own. Gradients are scaled by min(1, max_grad_norm / (norm + 1e-6)) as torch.nn.utils.clip_grad_norm_ does; None or
    0 does not clip. `decay_mask` is a pytree of bools or a function from params to one; by default weights decay,
    norms and biases do not. Moments have the dtype of the parameters. Raises ValueError as `make_schedule`.
    """
    if not callable(learning_rate):
        learning_rate = make_schedule(
            learning_rate, total_steps, schedule=schedule, warmup_steps=warmup_steps, **options
        )
    elif options:
        raise ValueError(
            f"{', '.join(options)}: schedule options do not apply to a schedule of your own; leave them out"
        )
    return _adamw(learning_rate, betas, eps, weight_decay, max_grad_norm or math.inf, decay_mask or matrices)


def _adamw(rate, betas, eps, weight_decay, max_norm, decay_mask) -> SkippingOptimizer:
    def init(params):
        moments = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
        return optax.ScaleByAdamState(jnp.zeros((), jnp.int32), *moments)

    def update(grads, state, params, *, finite=True, grad_norm=None, **_):
        count, learning_rate = state.count + 1, rate(state.count)
        first, second = (1 - beta ** count.astype(jnp.float32) for beta in betas)
        scale = _clip_scale(grads, grad_norm, max_norm)

        def moment(old, new, beta):
            return jnp.where(finite, beta * old + (1 - beta) * new, old)

        def leaf(grad, mu, nu, param, decays):
            grad = grad * scale.astype(grad.dtype)
            # The barrier makes the update read the new moments: each of the three is then one pass, in place.
            mu, nu = lax.optimization_barrier((moment(mu, grad, betas[0]), moment(nu, jnp.square(grad), betas[1])))
            step = mu / first / (jnp.sqrt(nu / second) + eps)
            if weight_decay and decays:
                step = step + weight_decay * param
            return jnp.where(finite, -learning_rate * step, 0.0).astype(grad.dtype), mu, nu

        masks = decay_mask(params) if callable(decay_mask) else decay_mask
        out = jax.tree.map(leaf, grads, state.mu, state.nu, params, masks)
        updates, mu, nu = jax.tree.transpose(jax.tree.structure(grads), jax.tree.structure((0, 0, 0)), out)
        return updates, optax.ScaleByAdamState(jnp.where(finite, count, state.count), mu, nu)

    return SkippingOptimizer(init, update)


def _clip_scale(grads, grad_norm, max_norm):
    if max_norm == math.inf:
        return jnp.ones((), jnp.float32)
    norm = global_norm(grads) if grad_norm is None else grad_norm
    return jnp.minimum(1.0, max_norm / (norm + 1e-6))


def matrices(params: Any) -> Any:
    """A pytree of bools: True for weights that decay, False for norm scales and biases."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: getattr(path[-1], "key", None) not in ("scale", "bias"), params
    )


def global_norm(tree: Any) -> Float[Array, ""]:
    """Square root of the sum of squares over all leaves, in float32.

    Summed over the last axis, then over the rest, as one long float32 sum of like numbers loses digits (torch sums in a
    tree too). The barrier keeps XLA from making one sum of the two.
    """

    def square_sum(leaf):
        squares = jnp.square(leaf.astype(jnp.float32))
        return lax.optimization_barrier(squares.sum(-1)).sum() if leaf.ndim else squares

    return jnp.sqrt(sum(map(square_sum, jax.tree.leaves(tree)), jnp.zeros((), jnp.float32)))


def make_schedule(
    learning_rate: float, total_steps: int, *, schedule: str = "linear", warmup_steps: int = 0, **options: Any
) -> optax.Schedule:
    """The learning rate of update number n (from 0), with the names, options and values of transformers.get_scheduler.

    | schedule | options |
    |---|---|
    | constant (no warm-up), constant_with_warmup, linear | |
    | cosine | num_cycles (0.5) |
    | cosine_with_min_lr | min_lr or min_lr_rate, num_cycles |
    | inverse_sqrt | timescale (warmup_steps, or 10,000 where that is 0) |
    | warmup_stable_decay | num_decay_steps, num_stable_steps, warmup_type, decay_type, min_lr_ratio, num_cycles |

    The schedule takes an int (computed in NumPy) or a traced int32. Raises ValueError for an unknown name, an unknown
    or missing option, or a value outside of its range.
    """
    if schedule not in _SCHEDULES:
        raise ValueError(f"schedule is {schedule!r}: use one of {', '.join(_SCHEDULES)}")
    for name, value in (
        ("learning_rate", learning_rate),
        ("total_steps", total_steps),
        ("warmup_steps", warmup_steps),
    ):
        if value < 0:
            raise ValueError(f"{name} is {value}: it must not be negative")
    factory, names = _SCHEDULES[schedule]
    unknown = set(options) - set(names)
    if unknown:
        allowed = ", ".join(names) or "no option"
        raise ValueError(f"schedule {schedule!r} has no option {sorted(unknown)[0]!r}: it takes {allowed}")
    options = {name: value for name, value in options.items() if value is not None}
    for name, value in options.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not name.endswith("_type") and not (is_number and 0 <= value < math.inf):
            raise ValueError(f"{name} of schedule {schedule!r} is {value!r}: it must be a number from 0 on")
    if "min_lr" in options:
        if "min_lr_rate" in options:
            raise ValueError("min_lr and min_lr_rate are both set: leave one out")
        if not learning_rate:
            raise ValueError("min_lr is set and learning_rate is 0: raise learning_rate")
        options["min_lr_rate"] = options.pop("min_lr") / learning_rate
    factor = factory(total_steps=total_steps, warmup_steps=warmup_steps, **options)

    def rate(count):
        xp = jnp if isinstance(count, jax.Array) else np
        return xp.float32(learning_rate) * factor(xp.float32(count), xp)

    return rate


Factor = Callable[[Any, Any], Any]  # (float32 count, numpy or jax.numpy) -> factor of the peak learning rate


def _warmup(count, steps, xp, after):
    return xp.where(count < steps, count / max(1, steps), after)


def _constant(total_steps: int, warmup_steps: int) -> Factor:
    return lambda count, xp: xp.ones_like(count)


def _constant_with_warmup(total_steps: int, warmup_steps: int) -> Factor:
    return lambda count, xp: _warmup(count, warmup_steps, xp, xp.ones_like(count))


def _linear(total_steps: int, warmup_steps: int) -> Factor:
    decay = max(1, total_steps - warmup_steps)
    return lambda count, xp: _warmup(count, warmup_steps, xp, xp.maximum(0.0, (total_steps - count) / decay))


def _cosine(total_steps: int, warmup_steps: int, num_cycles: float = 0.5, min_lr_rate: float = 0.0) -> Factor:
    def factor(count, xp):
        progress = (count - warmup_steps) / max(1, total_steps - warmup_steps)
        wave = 0.5 * (1 + xp.cos(np.float32(2 * np.pi * num_cycles) * progress))
        return _warmup(count, warmup_steps, xp, xp.maximum(0.0, wave * (1 - min_lr_rate) + min_lr_rate))

    return factor


def _cosine_with_min_lr(total_steps: int, warmup_steps: int, num_cycles: float = 0.5, min_lr_rate: float | None = None):
    if min_lr_rate is None:
        raise ValueError("schedule 'cosine_with_min_lr' needs min_lr or min_lr_rate: set one of them")
    return _cosine(total_steps, warmup_steps, num_cycles, min_lr_rate)


def _inverse_sqrt(total_steps: int, warmup_steps: int, timescale: int | None = None) -> Factor:
    scale = timescale or warmup_steps or 10_000

    def factor(count, xp):
        # Before the warm-up ends the root's argument may be negative, and that branch is not taken.
        return _warmup(count, warmup_steps, xp, xp.sqrt(scale / xp.maximum(count + (scale - warmup_steps), 1e-6)))

    return factor


_SHAPES: dict[str, Callable[..., Any]] = {
    "linear": lambda progress, cycles, xp: 1 - progress,
    "cosine": lambda progress, cycles, xp: 0.5 * (1 + xp.cos(np.float32(2 * np.pi * cycles) * progress)),
    "1-sqrt": lambda progress, cycles, xp: 1 - xp.sqrt(progress),
}


def _warmup_stable_decay(
    total_steps: int,
    warmup_steps: int,
    num_decay_steps: int | None = None,
    num_stable_steps: int | None = None,
    warmup_type: str = "linear",
    decay_type: str = "cosine",
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
) -> Factor:
    if num_decay_steps is None:
        raise ValueError("schedule 'warmup_stable_decay' needs num_decay_steps: set it")
    for name, value in (("warmup_type", warmup_type), ("decay_type", decay_type)):
        if value not in _SHAPES:
            raise ValueError(f"{name} is {value!r}: use one of {', '.join(_SHAPES)}")
    stable = total_steps - warmup_steps - num_decay_steps if num_stable_steps is None else num_stable_steps
    start = warmup_steps + stable  # of the decay

    def part(shape, progress, cycles, xp):
        value = _SHAPES[shape](xp.clip(progress, 0.0, 1.0), cycles, xp)
        return xp.maximum(0.0, value * (1 - min_lr_ratio) + min_lr_ratio)

    def factor(count, xp):
        up = part(warmup_type, 1 - count / max(1, warmup_steps), 0.5, xp)
        down = part(decay_type, (count - start) / max(1, num_decay_steps), num_cycles, xp)
        after = xp.where(count < start, 1.0, xp.where(count < start + num_decay_steps, down, min_lr_ratio))
        return xp.where(count < warmup_steps, up, after).astype(np.float32)

    return factor


_SCHEDULES: dict[str, tuple[Callable[..., Factor], tuple[str, ...]]] = {
    "constant": (_constant, ()),
    "constant_with_warmup": (_constant_with_warmup, ()),
    "linear": (_linear, ()),
    "cosine": (_cosine, ("num_cycles",)),
    "cosine_with_min_lr": (_cosine_with_min_lr, ("min_lr", "min_lr_rate", "num_cycles")),
    "inverse_sqrt": (_inverse_sqrt, ("timescale",)),
    "warmup_stable_decay": (
        _warmup_stable_decay,
        ("num_decay_steps", "num_stable_steps", "warmup_type", "decay_type", "min_lr_ratio", "num_cycles"),
    ),
}
