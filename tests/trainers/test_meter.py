"""The meter: means between logs, exact continuation after a resume, speed without pauses."""

import json
import time

import jax.numpy as jnp
import numpy as np
import pytest
from datasets import Dataset

from jaxtrl.trainers.data import Batches, Lines
from jaxtrl.trainers.meter import Clock, Meter

VALUES = np.random.default_rng(0).uniform(0, 5, (7, 4)).astype(np.float32)


def micro(tokens, padded):
    """A micro-batch of which only the counts matter."""
    batches = Batches(Lines(Dataset.from_dict({"input_ids": [[5, 6]], "loss_mask": [[False, True]]})), 1, block=8)
    return batches.build([[0]])._replace(tokens=tokens, padded=padded)


def add(meter, step):
    names = ("loss", "grad_norm", "entropy", "mean_token_accuracy")
    metrics = {name: jnp.float32(value) for name, value in zip(names, VALUES[step], strict=True)}
    metrics |= {"num_terms": jnp.float32(5), "skipped": jnp.float32(step == 2)}
    meter.add(metrics, [micro(10 + step, 20)], flops=1e6)


def test_means_since_the_last_log():
    meter = Meter(Clock())
    for step in range(3):
        add(meter, step)
    logs = meter.log()
    wide = VALUES.astype(float)
    assert logs["loss"] == pytest.approx(wide[:3, 0].mean(), rel=1e-15)
    assert logs["grad_norm"] == wide[2, 1]
    assert logs["entropy"] == pytest.approx(wide[:3, 2].mean(), rel=1e-15)
    assert logs["mean_token_accuracy"] == pytest.approx(wide[:3, 3].mean(), rel=1e-15)
    assert (logs["num_tokens"], logs["skipped_steps"]) == (33, 1)
    assert logs["padding_share"] == pytest.approx(1 - 33 / 60)
    add(meter, 3)
    assert meter.log()["loss"] == wide[3, 0]
    assert meter.log() == {}
    assert meter.train_loss() == pytest.approx(wide[:4, 0].mean(), rel=1e-15)


@pytest.mark.parametrize("stop", range(1, 7))
def test_a_resumed_meter_logs_what_the_uninterrupted_one_does(stop):
    whole, first, second = Meter(Clock()), Meter(Clock()), Meter(Clock())
    logs = []
    for step in range(7):
        for meter in (whole, first if step < stop else second):
            add(meter, step)
        if step in (2, 6):
            logs.append((whole.log(), (first if step < stop else second).log()))
        if step == stop - 1:
            second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for expected, found in logs:
        assert expected == found
    assert whole.train_loss() == second.train_loss()


def test_pauses_and_compiles_do_not_count_once_or_twice():
    clock = Clock()
    with clock.paused():
        time.sleep(0.2)
        clock.leave_out(0.2)  # a compile inside an evaluation
    assert 0 <= clock.seconds() < 0.15
    start = clock.seconds()
    time.sleep(0.1)
    clock.leave_out(0.1)
    assert -1e-3 <= clock.seconds() - start < 0.09


def test_speed_is_that_of_the_window():
    meter = Meter(Clock())
    add(meter, 0)
    time.sleep(0.1)
    tokens, flops, steps = meter.speed()
    assert 10 < tokens < 100
    assert flops == pytest.approx(steps * 1e6)
    time.sleep(0.01)
    assert meter.speed() == (0.0, 0.0, 0.0)
