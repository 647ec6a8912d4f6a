"""A training step on a mesh that is not here: memory of a device, what it sends, and how long that takes at best.

Everything is counted from the abstract step of the trainer, traced for this mesh: nothing is compiled, and layers are a
loop, so that the largest model takes seconds.
"""

import math
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from jaxtrl.hardware.cores import find_instance
from jaxtrl.hardware.links import instances_of, link_of
from jaxtrl.hardware.neuron import as_on_neuron
from jaxtrl.model.config import Qwen3Config
from jaxtrl.planning.collectives import Collective, Volume, count_collectives, wire_bytes
from jaxtrl.planning.costs import EFFICIENCY, step_flops
from jaxtrl.rows.batch import Sample, ShapeClass, concat_rows
from jaxtrl.rows.blocks import DEFAULT_BLOCK_SIZE
from jaxtrl.rows.ladder import ShapeSet
from jaxtrl.train.compiled import Programs
from jaxtrl.train.memory import StepMemory
from jaxtrl.train.mesh import make_mesh
from jaxtrl.trainers.fitting import GIB, fit_of
from jaxtrl.trainers.sft_config import SFTConfig
from jaxtrl.trainers.sft_steps import SFTSteps
from jaxtrl.trainers.steps import make_adamw

# Of the published Qwen3 models: hidden, MLP, layers, query heads, key/value heads, tied head; head_dim is 128 in all.
MODELS = {
    "0.6b": (1024, 3072, 28, 16, 8, True),
    "1.7b": (2048, 6144, 28, 16, 8, True),
    "4b": (2560, 9728, 36, 32, 8, True),
    "8b": (4096, 12288, 36, 32, 8, False),
    "14b": (5120, 17408, 40, 40, 8, False),
    "32b": (5120, 25600, 64, 64, 8, False),
}


def model_config(name: str) -> Qwen3Config:
    """The shape of a published Qwen3 model, a key of `MODELS`."""
    hidden, inner, layers, heads, kv_heads, tied = MODELS[name]
    return Qwen3Config(
        vocab_size=151_936,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=128,
        tie_word_embeddings=tied,
    )


def row_shape(args: SFTConfig) -> ShapeClass:
    """Of a device's row: per_device_train_batch_size sequences of max_length tokens, all trained."""
    length = args.max_length or 1024
    sample = Sample(np.zeros(length, np.int32), np.ones(length, bool))
    return ShapeSet.from_setting("auto").classify([concat_rows([sample] * args.per_device_train_batch_size)])


def step_transfers(steps: SFTSteps, shape: ShapeClass) -> dict[Collective, Volume]:
    """Of an optimizer step: all its micro-batches and the update."""
    total: dict[Collective, Volume] = {}
    for job in steps.train_jobs([shape]):
        times = steps.args.gradient_accumulation_steps if job.kind == "accumulate" else 1
        for found, volume in count_collectives(job.function.trace(*job.args).jaxpr).items():
            known = total.get(found, Volume(0, 0))
            total[found] = Volume(known.times + times * volume.times, known.bytes + times * volume.bytes)
    return total


def plan_mesh(args: SFTConfig, model: str, instance: str, sizes: dict[str, int]) -> dict[str, Any]:
    """The simulation as JSON values. Needs as many (virtual) devices as the mesh has; raises ValueError where the model
    cannot be cut so, or this instance type cannot have such a mesh."""
    kind, config, mesh = find_instance(instance), model_config(model), make_mesh(**sizes)
    axes = dict(mesh.shape)
    with as_on_neuron():
        steps = SFTSteps(config, args, mesh, Programs())
        steps.prepare_training(make_adamw(args, 1000)[0])
        shape = row_shape(args)
        fit = fit_of(steps, [shape], kind.core_gib * GIB)
        transfers = step_transfers(steps, shape)
    rows = [_transfer(instance, axes, found, volume) for found, volume in transfers.items()]
    flops = step_flops(config, shape, shape.lanes, DEFAULT_BLOCK_SIZE, steps.remat).total
    flops *= args.gradient_accumulation_steps / axes["tensor"]
    compute = flops / (kind.core_flops * EFFICIENCY)
    communication = math.fsum(row["seconds"] for row in rows)
    tokens = shape.tokens * axes["data"] * axes["fsdp"] * args.gradient_accumulation_steps
    return {
        "model": model,
        "instance": instance,
        "instances": instances_of(kind, mesh.size),
        "mesh": axes,
        "devices": mesh.size,
        "row_tokens": shape.tokens,
        "micro_batches": args.gradient_accumulation_steps,
        "memory": fit.to_json(),
        "transfers": sorted(rows, key=lambda row: -row["seconds"]),
        "step": {
            "flops": flops,
            "assumed_flops_per_second": kind.core_flops * EFFICIENCY,
            "compute_seconds": compute,
            "communication_seconds": communication,
            "seconds": {"apart": compute + communication, "overlapped": max(compute, communication)},
            "scaling_efficiency": {
                "apart": compute / (compute + communication),
                "overlapped": compute / max(compute, communication),
            },
            "tokens_per_second": {
                "apart": tokens / (compute + communication),
                "overlapped": tokens / max(compute, communication),
            },
        },
    }


def _transfer(instance: str, mesh: dict[str, int], found: Collective, volume: Volume) -> dict[str, Any]:
    link, sent = link_of(instance, mesh, found.axes), wire_bytes(found, volume)
    return {
        "kind": found.kind,
        "axes": list(found.axes),
        "devices": found.group,
        "dtype": found.dtype,
        "times": volume.times,
        "bytes": volume.bytes,
        "wire_bytes": sent,
        "link": link.name,
        "seconds": sent / link.bandwidth,
    }


def show_mesh_plan(plan: dict[str, Any], console: Console) -> None:
    """Print the simulation."""
    mesh = ", ".join(f"{name}={size}" for name, size in plan["mesh"].items())
    console.print(
        f"Qwen3-{plan['model']} on {plan['instances']} x {plan['instance']}, mesh {mesh} ({plan['devices']} devices), "
        f"rows of {plan['row_tokens']:,} tokens, {plan['micro_batches']} micro-batches a step"
    )
    memory = plan["memory"]
    parts = ", ".join(f"{name} {memory[name] / GIB:.2f}" for name in StepMemory._fields)
    console.print(
        f"memory of a device: {memory['total'] / GIB:.2f} of {memory['device'] / GIB:.0f} GiB ({parts}): "
        f"{'fits' if memory['fits'] else 'does not fit'}"
    )
    table = Table(title="what a device sends in a step", title_justify="left")
    for name in ("transfer", "axes", "devices", "dtype", "times", "GiB of arrays", "GiB sent", "link", "seconds"):
        table.add_column(name, justify="left" if name in ("transfer", "axes", "dtype", "link") else "right")
    for row in plan["transfers"]:
        table.add_row(
            row["kind"],
            ", ".join(row["axes"]),
            str(row["devices"]),
            row["dtype"],
            f"{row['times']:,}",
            f"{row['bytes'] / GIB:.3f}",
            f"{row['wire_bytes'] / GIB:.3f}",
            row["link"],
            f"{row['seconds']:.4f}",
        )
    console.print(table)
    step = plan["step"]
    console.print(
        f"a step: {step['compute_seconds']:.3f} s of products at {step['assumed_flops_per_second'] / 1e12:.0f} TFLOP/s "
        f"(assumed: {100 * EFFICIENCY:.0f} % of the data sheet), {step['communication_seconds']:.3f} s of transfers at "
        "the full rate of the links"
    )
    for name, words in (("apart", "one after the other"), ("overlapped", "fully overlapped")):
        console.print(
            f"  {words}: {step['seconds'][name]:.3f} s, {step['tokens_per_second'][name]:,.0f} tokens/s, scaling "
            f"efficiency {100 * step['scaling_efficiency'][name]:.0f} %"
        )
