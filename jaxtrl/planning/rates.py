"""Where a plan's estimates come from: given on the command line, known of the device, or measured here."""

import time
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrl.hardware.compile_cache import enable_compile_cache
from jaxtrl.hardware.devices import peak_flops
from jaxtrl.hardware.machine import matmul_rate
from jaxtrl.planning.costs import NEURON_COMPILE_SECONDS, NEURON_HIGH_COMPILE, NEURON_HIGH_STEP, Rates
from jaxtrl.planning.make import PlannedRun, steps_with
from jaxtrl.planning.options import PlanConfig
from jaxtrl.rows.batch import ShapeClass


def find_matmul_rate(options: PlanConfig, dtype: Any) -> tuple[float, str]:
    """(FLOP/s of one device, where the figure comes from); measures unless it is given or in a data sheet."""
    device = jax.devices()[0]
    if options.matmul_tflops is not None:
        return options.matmul_tflops * 1e12, "--matmul_tflops"
    known = peak_flops(device, str(jnp.dtype(dtype)))
    if known is not None:
        return known, f"data sheet of {device.device_kind}"
    return matmul_rate(dtype), f"measured: {jnp.dtype(dtype)} products of 2048 x 2048"


def with_compile_seconds(rates: Rates, given: float | None, run: PlannedRun, shape: ShapeClass) -> Rates:
    """`rates` with the seconds that a program takes to compile: given, known on Neuron, else measured by compiling the
    train program of `shape` under each compile_effort."""
    if jax.default_backend() == "neuron":
        low = NEURON_COMPILE_SECONDS if given is None else given
        source = "about a minute a program on Neuron" if given is None else "--seconds_per_compile"
        return rates._replace(
            compile_low=low,
            compile_high=low * NEURON_HIGH_COMPILE,
            compile_source=source,
            step_share=NEURON_HIGH_STEP,
        )
    if given is not None:
        return rates._replace(compile_low=given, compile_source="--seconds_per_compile")
    low, high = (_compile_seconds(run, shape, effort) for effort in ("low", "high"))
    return rates._replace(compile_low=low, compile_high=high, compile_source="measured: one program compiled each")


def _compile_seconds(run: PlannedRun, shape: ShapeClass, effort: str) -> float:
    """Seconds to trace, lower and compile the train program of `shape`, not looking into the persistent cache."""
    enable_compile_cache("off")
    jobs = steps_with(run, compile_effort=effort).train_jobs([shape], run.batches["train"].block)
    job = next(job for job in jobs if job.shape == shape)
    start = time.perf_counter()
    job.function.lower(*job.args).compile()
    return time.perf_counter() - start
