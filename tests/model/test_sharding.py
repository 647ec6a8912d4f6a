import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from jaxtrl.model.config import Qwen3Config
from jaxtrl.model.qwen3 import abstract_params
from jaxtrl.model.sharding import Shards, add_rows, param_specs, sum_over_tensor, take_rows, vary, varying_axes
from jaxtrl.train.mesh import make_mesh
from tests.fixture_t import CONFIG

CONFIG_T = Qwen3Config.from_dict({**CONFIG, "attention_bias": True})


def specs(shards):
    found = jax.tree_util.tree_leaves_with_path(param_specs(abstract_params(CONFIG_T), shards))
    return {path[-2].key + "." + path[-1].key if len(path) > 1 else path[-1].key: spec for path, spec in found}


def test_every_matrix_is_cut_along_hidden_size():
    found = specs(Shards(fsdp=2, tensor=2))
    assert found["embed_tokens"] == PartitionSpec("tensor", "fsdp")
    for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
        assert found[f"{name}.kernel"] == PartitionSpec(None, "fsdp", "tensor")
    for name in ("o_proj", "down_proj"):
        assert found[f"{name}.kernel"] == PartitionSpec(None, "tensor", "fsdp")
    assert found["k_proj.bias"] == PartitionSpec(None, "tensor")
    small = {name for name, spec in found.items() if spec == PartitionSpec()}
    norms = {"input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "norm"}
    assert small == {"o_proj.bias", *(f"{name}.scale" for name in norms)}


def test_an_axis_of_size_one_cuts_nothing():
    assert set(specs(Shards(fsdp=2)).values()) == {
        PartitionSpec(),
        PartitionSpec(None, "fsdp"),
        PartitionSpec(None, "fsdp", None),
        PartitionSpec(None, None, "fsdp"),
    }
    assert set(specs(Shards()).values()) == {PartitionSpec()}


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        (Shards(tensor=4), "mesh axis tensor is 4, but the model's num_key_value_heads is 2: set tensor to a divisor"),
        (Shards(fsdp=5), "mesh axis fsdp is 5, but the model's hidden_size is 32: set fsdp to a divisor of it"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(shards, message):
    with pytest.raises(ValueError, match=message):
        shards.check(CONFIG_T)


def test_rows_of_a_cut_table():
    """Taken as from the whole table, each device its own ids, and added to it as the transpose."""
    mesh, shards = make_mesh(data=1, fsdp=2, tensor=2), Shards(2, 2)
    rng = np.random.default_rng(0)
    table = rng.standard_normal((6, 4)).astype(np.float32)
    ids, rows = np.array([[5, 0, 3], [3, 3, 2]], np.int32), rng.standard_normal((2, 3, 4)).astype(np.float32)

    def on_device(table, ids, rows):
        taken = sum_over_tensor(take_rows(table, ids[0], shards, jnp.float32))
        whole = vary(rows[0], varying_axes((table, rows)))
        return taken[None], add_rows(table, ids[0], whole, shards)

    cut, own = PartitionSpec("tensor", "fsdp"), PartitionSpec("fsdp")
    run = jax.shard_map(on_device, mesh=mesh, in_specs=(cut, own, own), out_specs=(own, cut))
    taken, added = jax.jit(run)(table, ids, rows)
    np.testing.assert_array_equal(taken, table[ids])
    expected = table.copy()
    np.add.at(expected, ids, rows)
    np.testing.assert_allclose(added, expected, rtol=1e-6)


def test_vary():
    """The cast makes a loop carry fit, and its gradient is the sum over the devices."""
    mesh = make_mesh(2)

    def on_device(x, weight):
        assert varying_axes((x, weight)) == {"data"}
        assert varying_axes(weight) == frozenset()

        def loss(weight):
            start = vary(jnp.zeros(()), varying_axes(x))
            total, _ = lax.scan(lambda c, v: (c + v, None), start, x[0] * vary(weight, varying_axes(x)))
            return total

        return jax.grad(loss)(weight)

    specs = (PartitionSpec("data"), PartitionSpec())
    run = jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=PartitionSpec()))
    assert float(run(np.array([[1.0, 2.0], [3.0, 4.0]], np.float32), jnp.float32(1))) == 10.0
    assert varying_axes(jnp.zeros(3)) == frozenset()
