"""AdamW against a float64 NumPy reference, optax and torch; schedules against Transformers' golden numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtrl.train.optimizer import global_norm, make_optimizer, make_schedule


def tree(seed):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    return {"proj": {"kernel": draw(4, 3), "bias": draw(3)}, "norm": {"scale": draw(4)}}


def adamw_reference(params, gradients, rates, weight_decay=0.0, b1=0.9, b2=0.999, eps=1e-8, max_norm=None):
    """torch.optim.AdamW after clip_grad_norm_, float64."""
    flat = {(a, b): x.astype(np.float64) for a, group in params.items() for b, x in group.items()}
    m, v = ({k: np.zeros_like(x) for k, x in flat.items()} for _ in range(2))
    for n, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        g = {(a, b): x.astype(np.float64) for a, group in gradient.items() for b, x in group.items()}
        norm = np.sqrt(sum((x**2).sum() for x in g.values()))
        scale = min(1.0, max_norm / (norm + 1e-6)) if max_norm else 1.0
        for k in flat:
            decay = weight_decay if k[1] == "kernel" else 0.0
            x = g[k] * scale
            m[k], v[k] = b1 * m[k] + (1 - b1) * x, b2 * v[k] + (1 - b2) * x**2
            flat[k] *= 1 - rate * decay
            flat[k] -= rate * (m[k] / (1 - b1**n)) / (np.sqrt(v[k] / (1 - b2**n)) + eps)
    return flat


def run(optimizer, params, gradients, **extra):
    state = optimizer.init(params)
    for gradient in gradients:
        updates, state = jax.jit(optimizer.update)(gradient, state, params, **extra)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("max_norm", [None, 1.0, 100.0])
def test_adamw(weight_decay, max_norm):
    params, gradients = tree(0), [tree(i) for i in range(1, 6)]
    optimizer = make_optimizer(1e-2, 10, weight_decay=weight_decay, max_grad_norm=max_norm)
    got, state = run(optimizer, params, gradients)
    rates = [1e-2 * (1 - n / 10) for n in range(5)]
    want = adamw_reference(params, gradients, rates, weight_decay, max_norm=max_norm)
    for (a, b), value in want.items():
        np.testing.assert_allclose(got[a][b], value, rtol=1e-5, atol=1e-6)
    assert int(state.count) == 5


def test_equals_optax():
    params, gradients = tree(0), [tree(i) for i in range(1, 6)]
    mine = run(
        make_optimizer(1e-2, 10, schedule="constant", betas=(0.8, 0.95), eps=1e-6, max_grad_norm=0.0), params, gradients
    )
    other = run(optax.adamw(1e-2, b1=0.8, b2=0.95, eps=1e-6, weight_decay=0.0), params, gradients)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), mine[0], other[0])


@pytest.mark.torch
@pytest.mark.parametrize("max_norm", [1.0, 1000.0])
def test_equals_torch(max_norm):
    torch = pytest.importorskip("torch")
    params, gradients = tree(0), [tree(i) for i in range(1, 6)]
    got, _ = run(
        make_optimizer(1e-2, 10, schedule="constant", weight_decay=0.1, max_grad_norm=max_norm), params, gradients
    )
    leaves, structure = jax.tree.flatten(params)
    tensors = [torch.nn.Parameter(torch.tensor(x)) for x in leaves]
    decays = jax.tree.leaves({"proj": {"kernel": True, "bias": False}, "norm": {"scale": False}})
    groups = [{"params": [t], "weight_decay": 0.1 if d else 0.0} for t, d in zip(tensors, decays, strict=True)]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    for gradient in gradients:
        for t, g in zip(tensors, jax.tree.leaves(gradient), strict=True):
            t.grad = torch.tensor(g)
        torch.nn.utils.clip_grad_norm_(tensors, max_norm)
        optimizer.step()
    want = jax.tree.unflatten(structure, [t.detach().numpy() for t in tensors])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


def test_decay_mask():
    params = tree(0)
    zero = jax.tree.map(np.zeros_like, params)
    options = {"schedule": "constant", "weight_decay": 0.5}
    got, _ = run(make_optimizer(0.1, 10, **options), params, [zero])
    np.testing.assert_allclose(got["proj"]["kernel"], params["proj"]["kernel"] * 0.95, rtol=1e-6)
    np.testing.assert_array_equal(got["proj"]["bias"], params["proj"]["bias"])
    np.testing.assert_array_equal(got["norm"]["scale"], params["norm"]["scale"])
    mask = {"proj": {"kernel": False, "bias": True}, "norm": {"scale": False}}
    got, _ = run(make_optimizer(0.1, 10, decay_mask=mask, **options), params, [zero])
    np.testing.assert_array_equal(got["proj"]["kernel"], params["proj"]["kernel"])
    np.testing.assert_allclose(got["proj"]["bias"], params["proj"]["bias"] * 0.95, rtol=1e-6)


def test_not_finite_is_skipped():
    params = tree(0)
    optimizer = make_optimizer(1e-2, 10)
    params, state = run(optimizer, params, [tree(1)], finite=jnp.array(True))
    bad = jax.tree.map(lambda x: np.full_like(x, np.nan), params)
    updates, after = jax.jit(optimizer.update)(
        bad, state, params, finite=jnp.array(False), grad_norm=jnp.float32(np.nan)
    )
    assert all(not np.any(x) for x in jax.tree.leaves(updates))
    jax.tree.map(np.testing.assert_array_equal, after, state)


def test_known_norm_is_used():
    params, gradient = tree(0), tree(1)
    optimizer = make_optimizer(1e-2, 10, max_grad_norm=1.0)
    _, plain = run(optimizer, params, [gradient])
    _, state = run(optimizer, params, [gradient], grad_norm=2 * global_norm(gradient))
    for moment, want in zip(jax.tree.leaves(state.mu), jax.tree.leaves(plain.mu), strict=True):
        np.testing.assert_allclose(moment, want / 2, rtol=1e-5)


def test_global_norm_is_exact_over_many_entries():
    x = np.full((4000, 1001), 0.1, np.float32)
    y = np.full(3, 2.0, np.float32)
    want = np.sqrt(0.1**2 * x.size + 12.0)
    np.testing.assert_allclose(jax.jit(global_norm)({"x": x, "y": y}), want, rtol=2e-6)


def test_bf16_compute_moves_float32_master():
    """Case C13: a weight that bfloat16 cannot move in steps of 1e-4."""
    optimizer = make_optimizer(1e-4, 100, schedule="constant", max_grad_norm=None)
    params = {"w": {"kernel": jnp.ones(1)}}
    state = optimizer.init(params)

    def loss(p):
        return p["w"]["kernel"].astype(jnp.bfloat16).astype(jnp.float32).sum()

    @jax.jit
    def step(params, state):
        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(100):
        params, state = step(params, state)
    weight = params["w"]["kernel"]
    assert weight.dtype == jnp.float32
    np.testing.assert_allclose(weight[0], 0.989998, atol=1e-6)
    assert float(weight.astype(jnp.bfloat16)[0]) == 0.98828125


def test_own_schedule():
    optimizer = make_optimizer(lambda count: 0.1 * (count + 1), 10, max_grad_norm=None)
    params = {"w": {"kernel": np.zeros(1, np.float32)}}
    ones = {"w": {"kernel": np.ones(1, np.float32)}}
    got, _ = run(optimizer, params, [ones, ones])
    np.testing.assert_allclose(got["w"]["kernel"], [-0.3], rtol=1e-5)
    with pytest.raises(ValueError, match="num_cycles: schedule options do not apply"):
        make_optimizer(lambda count: 0.1, 10, num_cycles=2)


# (schedule, total steps, warm-up, options); GOLDEN has the factors of transformers 5.24's get_scheduler, one per update
CASES = [
    ("linear", 25, 5, {}),
    ("linear", 10, 0, {}),
    ("constant", 10, 0, {}),
    ("constant_with_warmup", 10, 4, {}),
    ("cosine", 20, 5, {}),
    ("cosine", 20, 0, {"num_cycles": 1.5}),
    ("cosine_with_min_lr", 20, 5, {"min_lr_rate": 0.1}),
    ("cosine_with_min_lr", 20, 5, {"min_lr": 2e-4}),
    ("inverse_sqrt", 30, 5, {}),
    ("inverse_sqrt", 30, 0, {}),
    ("inverse_sqrt", 30, 8, {"timescale": 3}),
    ("warmup_stable_decay", 20, 4, {"num_decay_steps": 6}),
    ("warmup_stable_decay", 20, 4, {"num_decay_steps": 6, "decay_type": "linear", "min_lr_ratio": 0.1}),
    ("warmup_stable_decay", 20, 4, {"num_decay_steps": 6, "warmup_type": "cosine", "decay_type": "1-sqrt"}),
    ("warmup_stable_decay", 20, 4, {"num_decay_steps": 6, "warmup_type": "1-sqrt", "num_cycles": 1.0}),
]
GOLDEN = [
    [
        0.0,
        0.2,
        0.4,
        0.6,
        0.8,
        1.0,
        0.95,
        0.9,
        0.85,
        0.8,
        0.75,
        0.7,
        0.65,
        0.6,
        0.55,
        0.5,
        0.45,
        0.4,
        0.35,
        0.3,
        0.25,
        0.2,
        0.15,
        0.1,
        0.05,
        0.0,
        0.0,
    ],
    [
        1.0,
        0.9,
        0.8,
        0.7,
        0.6,
        0.5,
        0.4,
        0.3,
        0.2,
        0.1,
        0.0,
        0.0,
    ],
    [
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
    ],
    [
        0.0,
        0.25,
        0.5,
        0.75,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
    ],
    [
        0.0,
        0.2,
        0.4,
        0.6,
        0.8,
        1.0,
        0.9890738,
        0.9567727,
        0.9045085,
        0.8345653,
        0.75,
        0.6545085,
        0.5522642,
        0.4477358,
        0.3454915,
        0.25,
        0.1654347,
        0.0954915,
        0.04322727,
        0.0109262,
        0.0,
        0.0109262,
    ],
    [
        1.0,
        0.9455033,
        0.7938926,
        0.5782172,
        0.3454915,
        0.1464466,
        0.02447174,
        0.00615583,
        0.0954915,
        0.2730048,
        0.5,
        0.7269952,
        0.9045085,
        0.9938442,
        0.9755283,
        0.8535534,
        0.6545085,
        0.4217828,
        0.2061074,
        0.05449674,
        0.0,
        0.05449674,
    ],
    [
        0.0,
        0.2,
        0.4,
        0.6,
        0.8,
        1.0,
        0.9901664,
        0.9610955,
        0.9140576,
        0.8511088,
        0.775,
        0.6890576,
        0.5970378,
        0.5029622,
        0.4109424,
        0.325,
        0.2488912,
        0.1859424,
        0.1389045,
        0.1098336,
        0.1,
        0.1098336,
    ],
    [
        0.0,
        0.2,
        0.4,
        0.6,
        0.8,
        1.0,
        0.991259,
        0.9654182,
        0.9236068,
        0.8676522,
        0.8,
        0.7236068,
        0.6418114,
        0.5581886,
        0.4763932,
        0.4,
        0.3323478,
        0.2763932,
        0.2345818,
        0.208741,
        0.2,
        0.208741,
    ],
    [
        0.0,
        0.2,
        0.4,
        0.6,
        0.8,
        1.0,
        0.9128709,
        0.8451543,
        0.7905694,
        0.745356,
        0.7071068,
        0.6741999,
        0.6454972,
        0.6201737,
        0.5976143,
        0.5773503,
        0.559017,
        0.5423261,
        0.5270463,
        0.5129892,
        0.5,
        0.48795,
        0.4767313,
        0.4662524,
        0.4564355,
        0.4472136,
        0.438529,
        0.4303315,
        0.4225771,
        0.4152274,
        0.4082483,
        0.4016097,
    ],
    [
        1.0,
        0.99995,
        0.9999,
        0.99985,
        0.9998001,
        0.9997501,
        0.9997001,
        0.9996502,
        0.9996002,
        0.9995503,
        0.9995004,
        0.9994505,
        0.9994005,
        0.9993506,
        0.9993007,
        0.9992508,
        0.999201,
        0.9991511,
        0.9991012,
        0.9990514,
        0.9990015,
        0.9989517,
        0.9989018,
        0.998852,
        0.9988022,
        0.9987523,
        0.9987025,
        0.9986527,
        0.9986029,
        0.9985531,
        0.9985034,
        0.9984536,
    ],
    [
        0.0,
        0.125,
        0.25,
        0.375,
        0.5,
        0.625,
        0.75,
        0.875,
        1.0,
        0.8660254,
        0.7745967,
        0.7071068,
        0.6546537,
        0.6123724,
        0.5773503,
        0.5477226,
        0.522233,
        0.5,
        0.4803845,
        0.46291,
        0.4472136,
        0.4330127,
        0.420084,
        0.4082483,
        0.3973597,
        0.3872983,
        0.3779645,
        0.3692745,
        0.3611576,
        0.3535534,
        0.3464102,
        0.3396831,
    ],
    [
        0.0,
        0.25,
        0.5,
        0.75,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        0.9330127,
        0.75,
        0.5,
        0.25,
        0.0669873,
        0.0,
        0.0,
    ],
    [
        0.1,
        0.325,
        0.55,
        0.775,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        0.85,
        0.7,
        0.55,
        0.4,
        0.25,
        0.1,
        0.1,
    ],
    [
        0.0,
        0.1464466,
        0.5,
        0.8535534,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        0.5917517,
        0.4226497,
        0.2928932,
        0.1835034,
        0.08712907,
        0.0,
        0.0,
    ],
    [
        0.0,
        0.1339746,
        0.2928932,
        0.5,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        0.75,
        0.25,
        0.0,
        0.25,
        0.75,
        0.0,
        0.0,
    ],
]


@pytest.mark.parametrize(("case", "golden"), list(zip(CASES, GOLDEN, strict=True)))
def test_schedule(case, golden):
    name, total, warmup, options = case
    rate = make_schedule(1e-3, total, schedule=name, warmup_steps=warmup, **options)
    on_host = [rate(n) for n in range(len(golden))]
    np.testing.assert_allclose(on_host, 1e-3 * np.array(golden), rtol=2e-6, atol=2e-10)
    on_device = jax.jit(jax.vmap(rate))(jnp.arange(len(golden), dtype=jnp.int32))
    np.testing.assert_allclose(on_device, 1e-3 * np.array(golden), rtol=2e-6, atol=2e-10)
    assert on_device.dtype == jnp.float32


@pytest.mark.torch
@pytest.mark.parametrize("case", CASES, ids=str)
def test_schedule_against_transformers(case):
    torch = pytest.importorskip("torch")
    from transformers import get_scheduler

    name, total, warmup, options = case
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    scheduler = get_scheduler(name, optimizer, warmup, total, dict(options) or None)
    rate = make_schedule(1e-3, total, schedule=name, warmup_steps=warmup, **options)
    for n in range(total + 2):
        np.testing.assert_allclose(rate(n), optimizer.param_groups[0]["lr"], rtol=2e-6, atol=2e-10)
        optimizer.step()
        scheduler.step()


def test_schedule_ticks_per_update():
    """Case C12: 100 micro-batches, accumulation 4: 25 updates."""
    rate = make_schedule(1e-3, 25, schedule="linear", warmup_steps=5)
    used = [float(rate(n)) for n in range(25)]
    np.testing.assert_allclose(used[:7], [0, 2e-4, 4e-4, 6e-4, 8e-4, 1e-3, 9.5e-4], rtol=1e-6)
    np.testing.assert_allclose(used[-1], 5e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "cosin"}, "schedule is 'cosin': use one of constant, constant_with_warmup, linear, cosine"),
        ({"schedule": "linear", "num_cycles": 2}, "schedule 'linear' has no option 'num_cycles': it takes no option"),
        ({"schedule": "cosine", "min_lr": 2}, "schedule 'cosine' has no option 'min_lr': it takes num_cycles"),
        ({"schedule": "cosine_with_min_lr"}, "needs min_lr or min_lr_rate"),
        ({"schedule": "cosine_with_min_lr", "min_lr": None}, "needs min_lr or min_lr_rate"),
        ({"schedule": "cosine_with_min_lr", "min_lr_rate": "x"}, "min_lr_rate of schedule .* is 'x': it must be a num"),
        ({"schedule": "cosine", "num_cycles": float("nan")}, "num_cycles of schedule .* is nan"),
        ({"schedule": "inverse_sqrt", "timescale": -1}, "timescale of schedule .* is -1"),
        ({"schedule": "cosine_with_min_lr", "min_lr": 1e-5, "min_lr_rate": 0.1}, "both set"),
        ({"schedule": "warmup_stable_decay"}, "needs num_decay_steps"),
        ({"schedule": "warmup_stable_decay", "num_decay_steps": 3, "decay_type": "x"}, "decay_type is 'x': use one of"),
        ({"warmup_steps": -1}, "warmup_steps is -1: it must not be negative"),
    ],
)
def test_schedule_refuses(options, message):
    with pytest.raises(ValueError, match="min_lr is set and learning_rate is 0"):
        make_schedule(0.0, 10, schedule="cosine_with_min_lr", min_lr=1e-5)
    with pytest.raises(ValueError, match=message):
        make_schedule(1e-3, 10, **options)
    with pytest.raises(ValueError, match=message):
        make_optimizer(1e-3, 10, **options)
