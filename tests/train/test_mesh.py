import jax
import numpy as np
import pytest

from jaxtrl.train.mesh import make_mesh, param_shardings, replicated, row_count, row_sharding, shards_of


def test_make_mesh():
    assert dict(make_mesh().shape) == {"data": 8, "fsdp": 1, "tensor": 1}
    assert dict(make_mesh(3).shape) == {"data": 3, "fsdp": 1, "tensor": 1}
    assert dict(make_mesh(fsdp=2, tensor=2).shape) == {"data": 2, "fsdp": 2, "tensor": 2}
    assert row_count(make_mesh(3)) == 3
    assert row_count(make_mesh(2, 2, 2)) == 4
    assert shards_of(make_mesh(1, 2, 3)) == (2, 3)
    assert shards_of(None) == (1, 1)
    assert row_count(None) == 1


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"data": 9}, "mesh data=9, fsdp=1, tensor=1 needs 9 devices, but there are 8: lower one of the three"),
        ({"data": 3, "fsdp": 2, "tensor": 2}, "mesh data=3, fsdp=2, tensor=2 needs 12 devices, but there are 8"),
        ({"data": 0}, "mesh axis data is 0: give a size of at least 1"),
        ({"fsdp": 3}, "mesh axes fsdp=3 and tensor=1 do not divide 8 devices: set data"),
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
    table = jax.device_put(
        np.zeros((8, 4)), param_shardings({"lm_head": np.zeros((8, 4))}, make_mesh(1, 2, 4))["lm_head"]
    )
    assert {shard.data.shape for shard in table.addressable_shards} == {(2, 2)}
    assert replicated(None) is None
    assert param_shardings({}, None) is None
    assert row_sharding(None) is None
