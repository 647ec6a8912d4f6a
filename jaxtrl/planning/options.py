"""Options of `python -m jaxtrl.plan` beside those of the trainer."""

import dataclasses

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
    plot: str | None = option(
        None, "Draw lengths, buckets and padding to this image file (needs the extra `report`).", group="plan"
    )

    def __post_init__(self) -> None:
        for name in ("seconds_per_compile", "matmul_tflops", "device_memory_gib"):
            if getattr(self, name) == 0 and name != "seconds_per_compile":
                raise ValueError(f"{name}: expected more than 0")
