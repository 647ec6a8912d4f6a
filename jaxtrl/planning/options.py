"""Options of `python -m jaxtrl.plan` beside those of the trainer."""

import dataclasses

from jaxtrl.hardware.cores import INSTANCES
from jaxtrl.trainers.options import OptionsType, option


@dataclasses.dataclass
class PlanConfig(metaclass=OptionsType):
    """What a plan assumes about the machine, and where it looks for what samples share."""

    seconds_per_compile: float | None = option(
        None,
        "Seconds to compile a program (none: 60 on Neuron, elsewhere one program is compiled to measure it).",
        group="plan",
        minimum=0,
    )
    matmul_tflops: float | None = option(
        None,
        "Matrix-product rate of a device in TFLOP/s (none: the data sheet's, or measured).",
        group="plan",
        minimum=0,
    )
    device_memory_gib: float | None = option(
        None, "Memory of a device in GiB (none: that of the devices here).", group="plan", minimum=0
    )
    group_column: str | None = option(
        None,
        "Column whose equal values mark samples that belong together (none: trajectory or group where there is one).",
        group="plan",
    )
    rollouts: str | None = option(
        None,
        "Plan from rollouts instead of dataset_name: a JSONL file whose lines have prompt_ids and completion_ids "
        "(lists of token ids) or messages, and a group (number or text; none: lines with equal prompts).",
        group="plan",
    )
    model_shape: str | None = option(
        None,
        "Simulate a step of the Qwen3 model of this size on --mesh of --instance, without data: memory of a device, "
        "bytes that it sends, time; written to mesh_plan.json.",
        group="plan",
        choices=("0.6b", "1.7b", "4b", "8b", "14b", "32b"),
    )
    instance: str | None = option(
        None, "With model_shape: EC2 instance type (none: trn2.48xlarge).", group="plan", choices=tuple(INSTANCES)
    )
    plot: str | None = option(
        None, "Draw lengths, buckets and padding to this image file (needs the extra `report`).", group="plan"
    )

    def __post_init__(self) -> None:
        for name in ("seconds_per_compile", "matmul_tflops", "device_memory_gib"):
            if getattr(self, name) == 0 and name != "seconds_per_compile":
                raise ValueError(f"{name}: expected more than 0")
        if self.instance is not None and self.model_shape is None:
            raise ValueError("instance: it belongs to a simulation, set model_shape too")
