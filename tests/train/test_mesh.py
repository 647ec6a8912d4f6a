import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from jaxtrl.train.mesh import make_mesh, replicated, row_count, row_sharding, vary, varying_axes


def test_make_mesh():
    assert dict(make_mesh().shape) == {"data": 8, "fsdp": 1, "tensor": 1}
    assert dict(make_mesh(3).shape) == {"data": 3, "fsdp": 1, "tensor": 1}
    assert row_count(make_mesh(3)) == 3
    assert row_count(None) == 1


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"data": 9}, "mesh axis data is 9, but there are 8 devices"),
        ({"data": 0}, "mesh axis data is 0: give a size of at least 1"),
        ({"fsdp": 2}, "mesh axis fsdp is 2, but this version shards over data only: set fsdp=1"),
        ({"tensor": 2}, "mesh axis tensor is 2, but this version shards over data only"),
    ],
)
def test_make_mesh_refuses(sizes, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(**sizes)


def test_shardings():
    mesh = make_mesh(4)
    x = jax.device_put(np.arange(8).reshape(4, 2), row_sharding(mesh))
    assert {shard.data.shape for shard in x.addressable_shards} == {(1, 2)}
    assert jax.device_put(np.zeros(3), replicated(mesh)).is_fully_replicated
    assert replicated(None) is None
    assert row_sharding(None) is None


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
