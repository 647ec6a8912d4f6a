"""The device mesh and how a step's arrays lie on it (DESIGN.md section 7)."""

from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "tensor")
ROWS = PartitionSpec(("data", "fsdp"))  # the leading axis of every batch array: one row per device
REPLICATED = PartitionSpec()


def make_mesh(data: int | None = None, fsdp: int = 1, tensor: int = 1) -> Mesh:
    """A mesh with axes "data", "fsdp", "tensor" over the first data * fsdp * tensor devices.

    `data=None` takes all devices. Raises ValueError for a size below 1, for more devices than there are, and for
    fsdp or tensor above 1.
    """
    for name, size in (("data", data), ("fsdp", fsdp), ("tensor", tensor)):
        if size is not None and size < 1:
            raise ValueError(f"mesh axis {name} is {size}: give a size of at least 1")
        if name != "data" and size != 1:
            raise ValueError(f"mesh axis {name} is {size}, but this version shards over data only: set {name}=1")
    devices = jax.devices()
    data = len(devices) if data is None else data
    if data > len(devices):
        raise ValueError(f"mesh axis data is {data}, but there are {len(devices)} devices: lower it")
    return Mesh(np.array(devices[:data]).reshape(data, fsdp, tensor), AXES, axis_types=(AxisType.Auto,) * 3)


def replicated(mesh: Mesh | None) -> NamedSharding | None:
    """The sharding of parameters, optimizer state and metrics; None without a mesh."""
    return None if mesh is None else NamedSharding(mesh, REPLICATED)


def row_sharding(mesh: Mesh | None) -> NamedSharding | None:
    """The sharding of batch arrays: the leading axis over data x fsdp; None without a mesh."""
    return None if mesh is None else NamedSharding(mesh, ROWS)


def row_count(mesh: Mesh | None) -> int:
    """Number of rows D that a batch must have."""
    return 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]


def varying_axes(tree: Any) -> frozenset[str]:
    """The mesh axes over which any leaf of `tree` varies; empty outside `jax.shard_map`."""
    return frozenset().union(*(jax.typeof(leaf).mat.varying for leaf in jax.tree.leaves(tree)))


def vary(tree: Any, axes: frozenset[str]) -> Any:
    """`tree` with every leaf cast to vary over `axes` (as loop carries must). The cast's gradient is a psum."""

    def cast(leaf):
        missing = axes - jax.typeof(leaf).mat.varying
        return lax.pcast(leaf, tuple(sorted(missing)), to="varying") if missing else leaf

    return jax.tree.map(cast, tree)
