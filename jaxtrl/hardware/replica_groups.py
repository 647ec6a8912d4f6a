"""Do collectives over some of the devices work here? On Trainium, groups smaller than the job have hung.

`python -m jaxtrl.hardware.replica_groups` tries them and says `ok SIZE` for each; `try_small_groups` runs that in a
child process with a time limit, since a hang cannot be ended otherwise and a NeuronCore belongs to one process.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

SECONDS = 600.0  # starting the runtime and compiling one small program per size, twice over
COMMAND = (sys.executable, "-m", "jaxtrl.hardware.replica_groups")
_OF_SEVERAL_HOSTS = ("NEURON_RT_ROOT_COMM_ID", "NEURON_PJRT_PROCESSES_NUM_DEVICES", "NEURON_PJRT_PROCESS_INDEX")


class GroupTrial(NamedTuple):
    """Sizes of groups in which all-reduce, all-gather and reduce-scatter gave the right result, and what went wrong."""

    sizes: tuple[int, ...]
    failure: str | None

    @property
    def is_mixed_mesh_possible(self) -> bool:
        return self.failure is None


def is_mixed(mesh: Mapping[str, int]) -> bool:
    """Whether collectives of a mesh with these axis sizes have groups smaller than all its devices."""
    return sum(size > 1 for size in mesh.values()) > 1


def try_small_groups(seconds: float = SECONDS, command: Sequence[str] = COMMAND) -> GroupTrial:
    """Run the trial on the devices that this process will have; before JAX starts in it."""
    environment = {name: value for name, value in os.environ.items() if name not in _OF_SEVERAL_HOSTS}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)
        output, failure = done.stdout, None
        if done.returncode:
            failure = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else ""  # bytes here, always
        failure = f"nothing came back within {seconds:g} s"
    sizes = tuple(int(line.split()[1]) for line in output.splitlines() if line.startswith("ok "))
    return GroupTrial(sizes, failure)


def check_mesh(mesh: Mapping[str, int]) -> None:
    """Raises ValueError where a mixed mesh is asked for and small groups do not work here."""
    if is_mixed(mesh) and not (trial := try_small_groups()).is_mixed_mesh_possible:
        sizes = ", ".join(f"{name}={size}" for name, size in mesh.items() if size > 1)
        raise ValueError(
            f"mesh {sizes} needs collectives over some of the devices, which fail here ({trial.failure}): give one "
            "axis all devices"
        )


def main() -> int:
    """Every size that divides the number of devices, but 1 and all."""
    import jax

    count = jax.device_count()
    for size in range(2, count):
        if count % size == 0:
            _try(size, count)
            print(f"ok {size}", flush=True)
    return 0


def _try(size: int, count: int) -> None:
    """Raises RuntimeError where a result is wrong."""
    import jax
    import numpy as np
    from jax import lax
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    # Neighbours form a group along "inner", devices at a distance along "outer": both kinds occur in a mesh.
    mesh = Mesh(np.array(jax.devices()).reshape(count // size, size), ("outer", "inner"))

    def collectives(x):
        return (
            lax.psum(x, "inner"),
            lax.psum(x, "outer"),
            lax.psum_scatter(lax.all_gather(x, "inner", axis=1, tiled=True), "inner", scatter_dimension=1, tiled=True),
        )

    specs = P("outer", "inner"), P("outer"), P(None, "inner")
    run = jax.jit(jax.shard_map(collectives, mesh=mesh, in_specs=specs[0], out_specs=(specs[1], specs[2], specs[0])))
    x = np.arange(count * 128, dtype=np.float32).reshape(count // size, size * 128)
    inner, outer, scattered = run(jax.device_put(x, NamedSharding(mesh, specs[0])))
    parts = x.reshape(-1, size, 128)
    expected = parts.sum(1), x.sum(0, keepdims=True), x * size
    for name, got, right in zip(("inner", "outer", "gather"), (inner, outer, scattered), expected, strict=True):
        if not np.array_equal(np.asarray(got), right):
            raise RuntimeError(f"groups of {size} devices give a wrong result ({name})")


if __name__ == "__main__":
    sys.exit(main())
