"""Whether a run fits into a device's memory, said before anything is compiled."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax

from jaxtrl.hardware.memory import device_memory
from jaxtrl.rows.batch import ShapeClass
from jaxtrl.train.compiled import Job
from jaxtrl.train.memory import FACTOR, StepMemory, step_memory
from jaxtrl.train.mesh import shards_of
from jaxtrl.trainers.steps import TrainSteps

GIB = 2**30


class Fit(NamedTuple):
    """What the largest step needs of a device, and what the device has (None: not known)."""

    memory: StepMemory
    device: int | None
    shape: ShapeClass

    @property
    def is_possible(self) -> bool:
        """False only where the estimate exceeds the device by more than it can be wrong."""
        return self.device is None or self.memory.total <= self.device * FACTOR

    def to_json(self) -> dict[str, Any]:
        return {
            **self.memory._asdict(),
            "total": self.memory.total,
            "device": self.device,
            "fits": self.is_possible,
            "refusal": None if self.is_possible else self.refusal(),
            "shape": list(self.shape),
        }

    def refusal(self) -> str:
        """One sentence: what does not fit, of what it is made, and what makes it less."""
        assert self.device is not None
        parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in self.memory._asdict().items())
        return (
            f"a row of {self.shape.tokens:,} tokens needs about {self.memory.total / GIB:.2f} GiB of a device that has "
            f"{self.device / GIB:.2f} ({parts}): lower per_device_train_batch_size or max_length, keep "
            "gradient_checkpointing, use bf16, or take a smaller model"
        )


def fit_of(steps: TrainSteps, shapes: Iterable[ShapeClass], limit: int | None = None) -> Fit:
    """Of the class that needs most. `limit`: bytes of a device (None: asked of the devices here)."""
    if limit is None:
        device = jax.local_devices()[0]
        limit = device_memory(device, 1 if steps.mesh is None else len(steps.mesh.local_devices))
    opt_state = steps.abstract_state().opt_state
    memory, shape = max(
        (
            (
                step_memory(
                    steps.config,
                    shape,
                    opt_state,
                    itemsize=steps.dtype.itemsize,
                    remat=steps.remat,
                    unroll=steps.unroll,
                    accumulates=not steps.fuses,
                    shards=shards_of(steps.mesh),
                ),
                shape,
            )
            for shape in shapes
        ),
        key=lambda pair: (pair[0].total, pair[1]),
    )
    return Fit(memory, limit, shape)


def check_fits(steps: TrainSteps, jobs: Iterable[Job]) -> None:
    """Raises ValueError with one sentence where a step of these programs cannot fit into a device."""
    shapes = [job.shape for job in jobs if job.kind in ("train", "accumulate") and isinstance(job.shape, ShapeClass)]
    if shapes and not (fit := fit_of(steps, shapes)).is_possible:
        raise ValueError(fit.refusal())
