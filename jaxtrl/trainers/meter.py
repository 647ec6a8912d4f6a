"""Metrics between two logs. Scalars stay on the device until they are asked for, so that no step waits for them."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from jaxtrl.trainers.data import MicroBatch

COUNTS = ("num_terms", "tokens", "distinct", "padded")  # of a step, from which other metrics are made
Total = Callable[[np.ndarray], np.ndarray]


class Clock:
    """Seconds of training: evaluating, saving and compiling are left out of the speed."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._start = now()
        self._left_out = 0.0
        self._is_paused = False

    def seconds(self) -> float:
        return self._now() - self._start - self._left_out

    def leave_out(self, seconds: float) -> None:
        """The last `seconds` were no training (nothing new inside a pause)."""
        if not self._is_paused:
            self._left_out += seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        start, outer = self._now(), self._is_paused
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = outer
            self.leave_out(self._now() - start)


class Meter:
    """Collects the metrics of each step and gives the means since the last log.

    `state_dict` holds what a resumed run needs to log exactly what the uninterrupted one would. `total` adds up over
    processes, which ask for logs at the same steps: each counts what it has built itself.
    """

    def __init__(self, clock: Clock, total: Total = lambda own: own):
        self.clock, self._total = clock, total
        self.num_tokens = 0
        self.skipped = 0
        self.loss_sum = 0.0  # of the steps fetched so far
        self.steps = 0
        self._pending: list[dict[str, float]] = []  # of the steps since the last log
        self._on_device: list[tuple[Any, dict[str, float]]] = []
        self.start_window()

    def start_window(self) -> None:
        """From here on `speed` counts; what was before (reading a checkpoint, a first evaluation) is left out."""
        self._window = dict.fromkeys(("steps", "tokens", "flops"), 0.0)
        self._window_start = self.clock.seconds()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is done inside is no training. The steps before are waited for: their seconds count, as they do."""
        jax.block_until_ready(self._on_device)
        with self.clock.paused():
            yield

    def add(self, metrics: Any, micro_batches: Sequence[MicroBatch], flops: float) -> None:
        """The metrics of a step (a dict of float32 scalars, still being computed, and numbers of the host) and what it
        was given."""
        counts = {name: sum(getattr(m, name) for m in micro_batches) for name in COUNTS[1:]}
        tokens = counts["tokens"]
        self._on_device.append((metrics, {name: float(count) for name, count in counts.items()}))
        for name, value in (("steps", 1), ("tokens", tokens), ("flops", flops)):
            self._window[name] += value

    def wait_for_step_before_last(self) -> None:
        """Keeps the host at most two steps ahead of the device: its queue and the progress bar stay honest."""
        if len(self._on_device) > 1:
            jax.block_until_ready(self._on_device[-2][0])

    def _fetch(self) -> None:
        if not self._on_device:
            return
        names = COUNTS[1:]
        own = np.array([[counts[name] for name in names] for _, counts in self._on_device], np.float64)
        totals = self._total(own).tolist()
        for metrics, values in zip(jax.device_get([metrics for metrics, _ in self._on_device]), totals, strict=True):
            counts = dict(zip(names, values, strict=True))
            step = {name: float(value) for name, value in metrics.items()}
            self.loss_sum += step["loss"]
            self.steps += 1
            self.skipped += int(step.pop("skipped"))
            self.num_tokens += int(counts["tokens"])
            self._pending.append({**step, **counts})
        self._on_device = []

    def log(self) -> dict[str, float | int]:
        """The metrics since the last log. Waits for the device.

        As in TRL these are means over steps (those that have the metric), maxima and minima where the name says so,
        sums of what is called a total, and the last grad_norm.
        """
        self._fetch()
        if not self._pending:
            return {}
        names = dict.fromkeys(name for step in self._pending for name in step if name not in COUNTS)
        logs: dict[str, float | int] = {
            **{name: self._reduce(name) for name in names},
            "num_tokens": self.num_tokens,
            "padding_share": 1 - self._sum("distinct") / max(self._sum("padded"), 1.0),
            "packing_ratio": self._sum("tokens") / max(self._sum("distinct"), 1.0),
            "skipped_steps": self.skipped,
        }
        self._pending = []
        return logs

    def speed(self) -> tuple[float, float, float]:
        """(tokens, FLOPs, steps) per second since the last call."""
        seconds = max(self.clock.seconds() - self._window_start, 1e-9)
        tokens, flops = self._total(np.array([self._window["tokens"], self._window["flops"]])).tolist()
        tokens, flops, steps = tokens / seconds, flops / seconds, self._window["steps"] / seconds
        self.start_window()
        return tokens, flops, steps

    def train_loss(self) -> float:
        """The mean loss over all steps of the run."""
        self._fetch()
        return self.loss_sum / max(self.steps, 1)

    def _sum(self, name: str) -> float:
        return float(sum(step[name] for step in self._pending))

    def _reduce(self, name: str) -> float:
        values = [step[name] for step in self._pending if name in step]
        if name == "grad_norm":
            return values[-1]
        words = name.rpartition("/")[2].split("_")
        if "total" in words:
            return sum(values)
        extreme = max if "max" in words else min if "min" in words else None
        return extreme(values) if extreme else sum(values) / len(values)

    def state_dict(self) -> dict[str, Any]:
        """JSON values. Waits for the device."""
        self._fetch()
        names = ("num_tokens", "skipped", "loss_sum", "steps")
        return {**{name: getattr(self, name) for name in names}, "pending": list(self._pending)}

    def load_state_dict(self, stored: dict[str, Any]) -> None:
        for name in ("num_tokens", "skipped", "loss_sum", "steps"):
            setattr(self, name, stored[name])
        self._pending = [dict(step) for step in stored["pending"]]
