"""What a program costs: seconds to compile, and seconds of a step counted in matrix-product FLOPs."""

from typing import Any, NamedTuple

from jaxtrl.model.config import Qwen3Config
from jaxtrl.rows.batch import ShapeClass
from jaxtrl.train.flops import Flops, train_flops

EFFICIENCY = 0.7  # of the matmul rate that a step reaches: README, "Measured"
NEURON_COMPILE_SECONDS = 60.0  # TRL's guide: about a minute for each new length (Qwen3-0.6B, trn2)
# With compiling as an option TRL saw, for the same model, about 2 minutes instead of 1, then 1.15 s instead of 1.71 s.
NEURON_HIGH_COMPILE, NEURON_HIGH_STEP = 2.0, 1.15 / 1.71


class Rates(NamedTuple):
    """Assumptions of the estimates, each with where it comes from.

    `step_share` is the duration of a step under compile_effort high relative to low (None: not known).
    """

    compile_low: float  # seconds per program
    compile_high: float | None
    compile_source: str
    matmul: float  # FLOP/s of one device in the compute dtype
    matmul_source: str
    step_share: float | None = None

    def seconds(self, flops: Any) -> Any:
        """Of a device that does `flops` matrix-product FLOPs (a number or an array)."""
        return flops / (self.matmul * EFFICIENCY)


def step_flops(config: Qwen3Config, shape: ShapeClass, lanes: int, block_size: int, remat: str) -> Flops:
    """Loss and gradient of one row of this class on one device, padding included. `lanes`: those that are computed (on
    an accelerator all of the class)."""
    pairs = (shape.tokens // block_size + lanes) * block_size**2
    return train_flops(config, shape.tokens, pairs, shape.slots, remat=remat)
