"""Evaluation: sums over all tokens of a data set, divided once, so that no batch or row counts more than its tokens."""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxtrl.train.distributed import gather_rows, sum_processes
from jaxtrl.trainers.data import MicroBatch


class EvalPrediction(NamedTuple):
    """What `compute_metrics` gets, under Transformers' names; n trained tokens in the order of the data."""

    predictions: tuple[np.ndarray, ...]  # log-prob float32[n], entropy float32[n], hit bool[n]
    label_ids: np.ndarray  # int32[n]


def evaluate(
    batches: Iterable[MicroBatch],
    run_eval: Callable[[MicroBatch], dict[str, Any]],
    run_score: Callable[[MicroBatch], Any],
    prefix: str,
    compute_metrics: Callable[[EvalPrediction], Mapping[str, float]] | None = None,
    compile_seconds: Callable[[], float] = lambda: 0.0,
) -> dict[str, float | int]:
    """Metrics of one data set: PREFIX_loss (token mean), PREFIX_entropy, PREFIX_mean_token_accuracy, PREFIX_num_tokens,
    PREFIX_runtime (seconds, all of them), PREFIX_tokens_per_second (without compiling), and those of `compute_metrics`.

    `run_eval` gives the sums of a batch on the device, `run_score` (logp, entropy, hit) per term, which is called where
    `compute_metrics` needs it; `compile_seconds` the seconds that this process has compiled.
    """
    start, compiled, sums, parts, tokens = time.perf_counter(), compile_seconds(), [], [], 0
    for micro in batches:
        sums.append(run_eval(micro))
        tokens += micro.tokens
        if compute_metrics is not None:
            parts.append(trained_terms(micro, gather_rows(run_score(micro))))
        if len(sums) > 1:
            jax.block_until_ready(sums[-2])  # no more than two batches wait on the device
    totals = {name: math.fsum(float(part[name]) for part in jax.device_get(sums)) for name in sums[0]}
    terms, tokens = max(totals["num_terms"], 1.0), int(sum_processes(np.array([tokens]))[0])
    seconds = time.perf_counter() - start
    running = max(seconds - (compile_seconds() - compiled), 1e-9)
    metrics: dict[str, float | int] = {
        f"{prefix}_loss": totals["loss_sum"] / max(totals["denominator"], 1.0),
        f"{prefix}_entropy": totals["entropy_sum"] / terms,
        f"{prefix}_mean_token_accuracy": totals["hit_sum"] / terms,
        f"{prefix}_num_tokens": tokens,
        f"{prefix}_runtime": seconds,
        f"{prefix}_tokens_per_second": tokens / running,
    }
    if compute_metrics is None:
        return metrics
    own = compute_metrics(_joined(parts))
    return metrics | {k if k.startswith(f"{prefix}_") else f"{prefix}_{k}": v for k, v in own.items()}


def trained_terms(micro: MicroBatch, scores: Any) -> tuple[np.ndarray, ...]:
    """(logp, entropy, hit, target id) of the trained tokens of a batch, of all processes, in the order of the data."""
    batch = micro.batch
    weight, slot_target, term_slot = gather_rows((batch.weight, batch.slot_target, batch.term_slot))
    used, targets = weight > 0, np.take_along_axis(slot_target, term_slot, axis=1)
    return (*(np.asarray(score)[used] for score in scores), targets[used])


def _joined(parts: list[tuple[np.ndarray, ...]]) -> EvalPrediction:
    *scores, targets = (np.concatenate(column) for column in zip(*parts, strict=True))
    return EvalPrediction(predictions=tuple(scores), label_ids=targets)
