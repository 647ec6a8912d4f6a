"""The meter: means between logs, exact continuation after a resume, speed without pauses."""

import json

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
    return batches.build([[0]])._replace(tokens=tokens, distinct=tokens, padded=padded)


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


class FakeTime:
    """Seconds that pass only when told."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def test_pauses_and_compiles_do_not_count_once_or_twice():
    time = FakeTime()
    clock = Clock(time)
    with clock.paused():
        time.now += 20
        clock.leave_out(15.0)  # a compile inside an evaluation
        with clock.paused():  # a checkpoint that a callback of the evaluation wants
            time.now += 3
    assert clock.seconds() == 0
    time.now += 7
    clock.leave_out(5.0)
    assert clock.seconds() == 2


def test_speed_leaves_out_compiling_evaluating_and_what_was_before_training():
    time = FakeTime()
    clock = Clock(time)
    meter = Meter(clock)
    time.now += 100  # the checkpoint is read, the first evaluation runs
    meter.start_window()
    time.now += 30
    clock.leave_out(30.0)  # the step compiles
    for step in range(2):
        time.now += 0.5
        add(meter, step)
    with meter.paused():
        time.now += 40
        clock.leave_out(25.0)
    assert meter.speed() == (21.0, 2e6, 2.0)
    time.now += 2
    add(meter, 2)
    assert meter.speed() == (6.0, 5e5, 0.5)
    time.now += 1
    assert meter.speed() == (0.0, 0.0, 0.0)


def test_a_pause_begins_when_the_steps_before_it_are_done():
    """The device is behind the host: what it still computes is training, though the evaluation is waiting."""
    time = FakeTime()

    class Running:
        def block_until_ready(self):
            time.now += 4
            return self

    meter = Meter(Clock(time))
    meter.add(Running(), [micro(10, 20)], flops=0.0)
    with meter.paused():
        time.now += 50
    assert meter.speed()[0] == 10 / 4
