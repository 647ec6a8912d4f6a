"""The device mesh and how a step's arrays lie on it (DESIGN.md section 7)."""

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxtrl.model.sharding import Shards, param_specs

AXES = ("data", "fsdp", "tensor")
ROWS = PartitionSpec(("data", "fsdp"))  # the leading axis of every batch array: one row per device
REPLICATED = PartitionSpec()


def make_mesh(data: int | None = None, fsdp: int = 1, tensor: int = 1) -> Mesh:
    """A mesh with axes "data", "fsdp", "tensor" over the first data * fsdp * tensor devices.

    Rows are split over data x fsdp; fsdp cuts parameters and optimizer state, tensor the computation on a row (see
    `jaxtrl.model.sharding`). `data=None` takes all devices. Raises ValueError for a size below 1 and for a number of
    devices that there is not.
    """
    for name, size in (("data", data), ("fsdp", fsdp), ("tensor", tensor)):
        if size is not None and size < 1:
            raise ValueError(f"mesh axis {name} is {size}: give a size of at least 1")
    devices, parts = jax.devices(), fsdp * tensor
    if data is None:
        if len(devices) % parts:
            raise ValueError(
                f"mesh axes fsdp={fsdp} and tensor={tensor} do not divide {len(devices)} devices: set data"
            )
        data = len(devices) // parts
    if (count := data * parts) > len(devices):
        sizes = f"data={data}, fsdp={fsdp}, tensor={tensor}"
        raise ValueError(f"mesh {sizes} needs {count} devices, but there are {len(devices)}: lower one of the three")
    return Mesh(np.array(devices[:count]).reshape(data, fsdp, tensor), AXES, axis_types=(AxisType.Auto,) * 3)


def mesh_of(sizes: dict[str, int]) -> Mesh | None:
    """`make_mesh(**sizes)`; without sizes that of all devices, or None for one device."""
    return make_mesh(**sizes) if sizes or jax.device_count() > 1 else None


def shards_of(mesh: Mesh | None) -> Shards:
    """Into how many parts the mesh cuts the parameters."""
    return Shards() if mesh is None else Shards(mesh.shape["fsdp"], mesh.shape["tensor"])


def param_shardings(params: Any, mesh: Mesh | None) -> Any:
    """The sharding of each parameter (of a nested dict of arrays, abstract ones too); None without a mesh."""
    if mesh is None:
        return None
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), param_specs(params, shards_of(mesh)))


def replicated(mesh: Mesh | None) -> NamedSharding | None:
    """The sharding of metrics and of what else every device has; None without a mesh."""
    return None if mesh is None else NamedSharding(mesh, REPLICATED)


def row_sharding(mesh: Mesh | None) -> NamedSharding | None:
    """The sharding of batch arrays: the leading axis over data x fsdp; None without a mesh."""
    return None if mesh is None else NamedSharding(mesh, ROWS)


def row_count(mesh: Mesh | None) -> int:
    """Number of rows D that a batch must have."""
    return 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]
