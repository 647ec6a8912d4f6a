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
    `jaxtrl.model.sharding`). `data=None` takes all devices. Raises ValueError for a size below 1, for a number of
    devices that there is not, and where one of several processes would have no device or a part of a row.
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
    if jax.process_count() > 1 and (count < len(devices) or jax.local_device_count() % tensor):
        raise ValueError(
            f"mesh data={data}, fsdp={fsdp}, tensor={tensor} does not suit {jax.process_count()} processes of "
            f"{jax.local_device_count()} devices: it has to have all devices, and tensor to divide those of a process"
        )
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


def own_rows(mesh: Mesh | None) -> range:
    """Which of these rows lie on devices of this process, and are built by it.

    Raises ValueError for a mesh in which a row is shared by processes, or those of a process are not consecutive.
    """
    if mesh is None or not mesh.is_multi_process:
        return range(row_count(mesh))
    process = [{device.process_index for device in row} for row in mesh.devices.reshape(row_count(mesh), -1)]
    rows = [number for number, owners in enumerate(process) if owners == {jax.process_index()}]
    own = range(rows[0], rows[-1] + 1) if rows else range(0)
    if len(own) != len(rows) or not rows or any(len(owners) > 1 for owners in process):
        raise ValueError(
            "mesh: each process needs consecutive rows of the batch for itself: order the devices by process, and let "
            "tensor divide the devices of a process"
        )
    return own


def place_rows(batch: Any, mesh: Mesh | None) -> Any:
    """The batch on the devices, from the rows `own_rows(mesh)` of its arrays in each process."""
    sharding = row_sharding(mesh)
    if mesh is None or not mesh.is_multi_process:
        return jax.device_put(batch, sharding)

    def place_leaf(rows):
        if isinstance(rows, jax.Array):  # the result of a program on this mesh
            return rows
        return jax.make_array_from_process_local_data(sharding, rows)

    return jax.tree.map(place_leaf, batch)
