"""The decoder: golden numbers, isolation, remat policies, parity with Transformers (logits and gradients)."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params
from jax.sharding import Mesh, PartitionSpec

from jaxtrl.hardware.neuron import lint
from jaxtrl.model.attention import attend
from jaxtrl.model.config import Qwen3Config
from jaxtrl.model.hf import params_from_hf, params_to_hf
from jaxtrl.model.qwen3 import Qwen3, abstract_params, check_input_ids, init_params, model_graphdef, model_params
from jaxtrl.rows.blocks import block_tables
from tests import fixture_t

CONFIG = Qwen3Config.from_dict(fixture_t.CONFIG)
SMALL = Qwen3Config(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=8,
    rope_theta=5e5,
    attention_bias=True,
    tie_word_embeddings=False,
    initializer_range=0.2,
)


def row(*documents: list[int], size: int | None = None, block_size: int = 8):
    """(ids, positions, visible_until, tables) of documents packed one after the other, padded to `size` tokens."""
    length = sum(map(len, documents))
    size = size or -(-length // block_size) * block_size
    ids, positions, until = np.zeros(size, np.int32), np.zeros(size, np.int32), np.arange(1, size + 1, dtype=np.int32)
    start = 0
    for document in documents:
        stop = start + len(document)
        ids[start:stop], positions[start:stop], until[start:stop] = document, np.arange(len(document)), stop
        start = stop
    return ids, positions, until, block_tables(until, block_size)


def logits(config, params, inputs, **options):
    model = nnx.merge(model_graphdef(config), params)
    return model(*inputs, **options).astype(jnp.float32) @ model.head_weight().T


@partial(jax.jit, static_argnames=("config", "remat", "unroll", "dtype"))
def token_nll(config, params, inputs, remat="full", unroll=1, dtype=jnp.float32):
    """NLL of inputs' next token at every index but the last."""
    scores = logits(config, params, inputs, remat=remat, unroll=unroll, dtype=dtype)
    return -jnp.take_along_axis(jax.nn.log_softmax(scores)[:-1], inputs[0][1:, None], 1)[:, 0]


@partial(jax.jit, static_argnames=("config", "remat", "unroll", "count"))
def loss_and_gradient(config, params, inputs, count, remat="full", unroll=1):
    return jax.value_and_grad(lambda p: token_nll(config, p, inputs, remat, unroll)[:count].mean())(params)


@pytest.fixture(scope="module")
def params():
    return params_from_hf(CONFIG, fixture_t.tensors())


def test_c18_c20_golden_losses_of_fixture_t(params):
    nll = np.asarray(token_nll(CONFIG, params, row(fixture_t.R2)))
    np.testing.assert_allclose(nll, fixture_t.R2_NLL, atol=1e-5)
    assert abs(nll.sum() - 38.241784) < 2e-5
    nll = np.asarray(token_nll(CONFIG, params, row(fixture_t.R1)))[:3]
    np.testing.assert_allclose(nll, fixture_t.R1_NLL, atol=1e-5)


def test_c20_theta_reaches_the_result(params):
    wrong = dataclasses.replace(CONFIG, rope_theta=1e4)
    assert abs(np.asarray(token_nll(wrong, params, row(fixture_t.R2))).sum() - 38.302196) < 2e-5


def test_c19_untied_head_has_its_own_loss():
    config = dataclasses.replace(CONFIG, tie_word_embeddings=False)
    nll = np.asarray(token_nll(config, params_from_hf(config, fixture_t.tensors(tie=False)), row(fixture_t.R2)))
    assert abs(nll.sum() - 32.045619) < 2e-5


def test_c10_documents_of_a_packed_row_have_the_losses_they_have_alone(params):
    nll = np.asarray(token_nll(CONFIG, params, row([5, 9, 12, 3], [7, 20, 31, 2])))
    np.testing.assert_allclose(nll[:3], fixture_t.R1_NLL, atol=1e-5)
    assert abs(nll[4:].sum() - 13.263072) < 2e-5


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_isolation_is_bitwise(params, dtype):
    run = jax.jit(lambda inputs: logits(CONFIG, params, inputs, dtype=dtype))
    a = np.asarray(run(row([5, 9, 12, 3, 8], fixture_t.R2, [9, 9], size=24)))
    b = np.asarray(run(row([1, 2, 63, 44, 8], fixture_t.R2, [17, 1], size=24)))
    assert (a[5:13] == b[5:13]).all()
    assert (a[:5] != b[:5]).any(axis=-1).all()
    assert np.isfinite(a).all()


def test_c08_an_id_outside_the_vocabulary_is_named_or_poisons_the_row(params):
    model = nnx.merge(model_graphdef(CONFIG), params)
    for bad in (64, -1):
        inputs = row([5, 9, bad, 3])
        with pytest.raises(ValueError, match=f"token id {bad} at index 2 is outside the vocabulary of 64 tokens"):
            model(*inputs)
        nll = np.asarray(token_nll(CONFIG, params, inputs))  # inside jit nothing can be raised
        assert np.isnan(nll[:3]).all()
    check_input_ids(np.array([0, 63]), 64)


def test_remat_must_be_known(params):
    with pytest.raises(ValueError, match="remat must be one of 'full', 'matmuls', but it is 'none'"):
        nnx.merge(model_graphdef(CONFIG), params)(*row(fixture_t.R1), remat="none")


def count_primitive(jaxpr, name: str) -> int:
    """How often a primitive is executed: equations in a scan count once per step."""
    total = 0
    for equation in jaxpr.eqns:
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        total += equation.primitive.name == name
        for sub in jaxprs_in_params(equation.params):
            total += times * count_primitive(sub, name)
    return total


def count_matmuls(f, *args) -> int:
    return count_primitive(jax.make_jaxpr(f)(*args).jaxpr, "dot_general")


def test_remat_policies_recompute_what_they_say(params):
    """matmuls: nothing of that kind twice; full: all but the last matmul, whose output no gradient needs."""
    inputs, layers = row(fixture_t.R2), CONFIG.num_hidden_layers
    q, k = jnp.ones((8, 4, 16)), jnp.ones((8, 2, 16))
    attention = partial(attend, visible_until=jnp.asarray(inputs[2]), tables=inputs[3])
    attention_forward = count_matmuls(attention, q, k, k)
    attention_both = count_matmuls(lambda *x: jax.vjp(attention, *x)[1](q), q, k, k)
    assert attention_forward >= 2

    def both(p, remat):
        return jax.vjp(lambda p: nnx.merge(model_graphdef(CONFIG), p)(*inputs, remat=remat), p)[1](jnp.ones((8, 32)))

    assert count_matmuls(partial(both, remat="matmuls"), params) == layers * (7 + 14 + attention_both)
    recomputed = 6 + attention_forward
    assert count_matmuls(partial(both, remat="full"), params) == layers * (7 + 14 + attention_both + recomputed)


@pytest.mark.parametrize("remat", ["full", "matmuls"])
@pytest.mark.parametrize("unroll", [1, 2])
def test_gradients_use_no_operation_that_neuron_lacks(params, remat, unroll):
    inputs = row(fixture_t.R2)

    def loss(p):
        return nnx.merge(model_graphdef(CONFIG), p)(*inputs, dtype=jnp.bfloat16, remat=remat, unroll=unroll).sum()

    assert lint(jax.jit(jax.grad(loss)), params) == []


def test_remat_and_unroll_change_nothing(params):
    inputs = row(fixture_t.R2)
    loss, gradient = loss_and_gradient(CONFIG, params, inputs, 7)
    other_loss, other = loss_and_gradient(CONFIG, params, inputs, 7, remat="matmuls", unroll=2)
    np.testing.assert_allclose(other_loss, loss, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), other, gradient)


def test_unrolled_recomputation_is_not_merged_with_the_forward_pass(params):
    inputs = row(fixture_t.R2)

    def barriers(unroll):
        text = loss_and_gradient.lower(CONFIG, params, inputs, 7, unroll=unroll).as_text()
        return re.findall(r"optimization_barrier (?:%\S+, ){2,}", text)  # not attention's, which have two operands

    assert barriers(unroll=2)
    assert not barriers(unroll=1)


def test_bfloat16_compute_is_close_and_stays_bfloat16(params):
    inputs = row(fixture_t.R2)
    hidden = nnx.merge(model_graphdef(CONFIG), params)(*inputs, dtype=jnp.bfloat16)
    assert hidden.dtype == jnp.bfloat16
    nll = np.asarray(token_nll(CONFIG, params, inputs, dtype=jnp.bfloat16))
    np.testing.assert_allclose(nll, fixture_t.R2_NLL, atol=0.15)


def test_gradients_of_rows_split_over_devices_add_up(params):
    """shard_map with check_vma: the model's gradient on each device's row, summed, is that of the rows together."""
    rows = [row([5, 9, 12, 3], size=8), row(fixture_t.R2, size=8)]
    lanes = max(len(r[3].lane_query) for r in rows)
    stacked = [np.stack(part) for part in zip(*(r[:3] for r in rows), strict=True)]
    tables = jax.tree.map(lambda *x: np.stack(x), *(block_tables(r[2], 8, lanes) for r in rows))
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    data = PartitionSpec("data")

    def sharded(p, ids, positions, until, tables):
        inputs = (ids[0], positions[0], until[0], jax.tree.map(lambda x: x[0], tables))
        nll = token_nll(CONFIG, p, inputs)[:3].sum()
        return jax.lax.psum(nll, "data")

    f = jax.shard_map(sharded, mesh=mesh, in_specs=(PartitionSpec(), data, data, data, data), out_specs=PartitionSpec())
    loss, gradient = jax.jit(jax.value_and_grad(f))(params, *stacked, tables)
    expected_loss, expected = jax.jit(
        jax.value_and_grad(lambda p: sum(token_nll(CONFIG, p, r)[:3].sum() for r in rows))
    )(params)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6), gradient, expected)


def test_params_and_graphdef_make_the_model_again():
    model = Qwen3(CONFIG, rngs=nnx.Rngs(3))
    params = model_params(model)
    again = nnx.merge(model_graphdef(CONFIG), params)
    assert again.config == CONFIG
    jax.tree.map(np.testing.assert_array_equal, model_params(again), params)
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), abstract_params(CONFIG))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == shapes
    assert sum(x.size for x in jax.tree.leaves(params)) == 23776
    assert model.head_weight() is model.embed_tokens.get_value()


def test_random_weights_follow_the_seed_and_initializer_range():
    config = dataclasses.replace(SMALL, initializer_range=0.02)
    a, b, c = init_params(config, 0), init_params(config, 0), init_params(config, 1)
    jax.tree.map(np.testing.assert_array_equal, a, b)
    assert (a["embed_tokens"] != c["embed_tokens"]).any()
    for params in (a, model_params(Qwen3(config, rngs=nnx.Rngs(0)))):
        kernel = np.asarray(params["layers"]["mlp"]["up_proj"]["kernel"])
        assert kernel.shape == (3, 48, 80)
        assert kernel.dtype == np.float32
        assert abs(kernel.std() - 0.02) < 1e-3
        assert (kernel[0] != kernel[1]).any()
        assert (np.asarray(params["norm"]["scale"]) == 1).all()
        assert (np.asarray(params["layers"]["self_attn"]["q_proj"]["bias"]) == 0).all()
    one, other = (model_params(Qwen3(config, rngs=nnx.Rngs(seed)))["lm_head"] for seed in (0, 1))
    assert (one != other).any()


def test_a_model_can_be_made_inside_jit():
    config = dataclasses.replace(CONFIG, num_hidden_layers=1, vocab_size=8)
    kernel = jax.jit(lambda: model_params(Qwen3(config, rngs=nnx.Rngs(0)))["layers"]["mlp"]["up_proj"]["kernel"])()
    assert abs(float(kernel.std()) - 0.02) < 2e-3


def transformers_model(config: Qwen3Config, params):
    torch = pytest.importorskip("torch")
    from transformers import Qwen3Config as TheirConfig
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM(TheirConfig.from_dict(config.to_dict())).float().train()
    state = {name: torch.from_numpy(np.array(array)) for name, array in params_to_hf(config, params)}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    return torch, model


def small_params(config: Qwen3Config):
    """Random parameters in which norms and biases differ from their initial values too."""
    rng = np.random.default_rng(7)
    return jax.tree.map(lambda x: x + rng.normal(size=x.shape).astype(np.float32) * 0.1, init_params(config, 5))


@pytest.mark.torch
@pytest.mark.parametrize("name", ["fixture T", "small", "small tied"])
def test_logits_and_gradients_equal_those_of_transformers(name, params):
    config = {"fixture T": CONFIG, "small": SMALL, "small tied": dataclasses.replace(SMALL, tie_word_embeddings=True)}[
        name
    ]
    params = params if name == "fixture T" else small_params(config)
    torch, theirs = transformers_model(config, params)
    ids = fixture_t.R2 if name == "fixture T" else np.random.default_rng(0).integers(0, 97, 21).tolist()
    inputs = row(ids)

    batch = torch.tensor([ids])
    expected = theirs(input_ids=batch, labels=batch)
    expected.loss.backward()
    expected_logits = expected.logits[0].detach().numpy()
    found = np.asarray(jax.jit(partial(logits, config))(params, inputs))[: len(ids)]
    np.testing.assert_allclose(found, expected_logits, atol=1e-5 * max(1, np.abs(expected_logits).max()))

    loss, gradient = loss_and_gradient(config, params, inputs, len(ids) - 1)
    assert abs(float(loss) - expected.loss.item()) < 1e-5
    expected_gradients = {key: value.grad.numpy() for key, value in theirs.named_parameters()}
    names = set()
    for key, value in params_to_hf(config, gradient):
        scale = max(1e-2, np.abs(expected_gradients[key]).max())
        np.testing.assert_allclose(value, expected_gradients[key], atol=1e-5 * scale, err_msg=key)
        names.add(key)
    assert names == set(expected_gradients)
