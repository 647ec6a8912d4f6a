"""`python -m jaxtrl.neuron check` with a CPU as the device: equal results pass, each injected fault is refused."""

import jax
import numpy as np
import pytest

from jaxtrl import neuron
from jaxtrl.hardware.replica_groups import GroupTrial
from jaxtrl.planning import device_check
from jaxtrl.planning.device_check import check_device

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results():
    """What a step and a generation give on the first and on the last device, computed once."""
    places = jax.devices()[0], jax.devices()[-1]
    return {place: (device_check.run_step(place, "float32"), device_check.run_decode(place)) for place in places}


@pytest.fixture
def check(results, monkeypatch, capsys):
    """check(fault) runs the command; `fault(step, completions)` gives what the last device computes then."""

    def run(fault=lambda step, done: (step, done)):
        changed = dict(results)
        step, (done, seconds) = results[jax.devices()[-1]]
        step, done = fault(step, done)
        changed[jax.devices()[-1]] = step, (done, seconds)
        monkeypatch.setattr(device_check, "run_step", lambda place, _: changed[place][0])
        monkeypatch.setattr(device_check, "run_decode", lambda place: changed[place][1])
        monkeypatch.setattr("jaxtrl.hardware.replica_groups.try_small_groups", lambda _: GroupTrial((2, 4), None))
        code = neuron.main(["check", "--device", "cpu"])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


def test_the_same_device_passes(check):
    code, out, err = check()
    assert (code, err) == (0, "")
    assert "collectives over some of the devices work for groups of 2, 4" in out
    assert "float32 gradient: 0" in out
    assert "sampler decode compiled in" in out
    assert "WRONG" not in out
    assert "computes what the CPU does" in out


def zeroed(tree, number):
    """The tree with one array of zeros, as a faulty gather gives."""
    leaves, treedef = jax.tree.flatten(tree)
    leaves[number] = np.zeros_like(leaves[number])
    return jax.tree.unflatten(treedef, leaves)


def other_token(done):
    tokens = done[1].token_ids.copy()
    tokens[3] += 1
    return [done[0], done[1]._replace(token_ids=tokens), *done[2:]]


FAULTS = {
    "loss": lambda step, done: (step._replace(loss=step.loss * 1.01), done),
    "gradient norm": lambda step, done: (step._replace(grad_norm=float("nan")), done),
    "float32 gradient": lambda step, done: (step._replace(gradients=zeroed(step.gradients, 0)), done),
    "updated parameters": lambda step, done: (step._replace(params=zeroed(step.params, -1)), done),
    "sampled tokens": lambda step, done: (step, other_token(done)),
    "log-probs": lambda step, done: (step, [done[0]._replace(logps=done[0].logps + np.float32(0.01)), *done[1:]]),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_refused(check, name):
    code, out, err = check(FAULTS[name])
    assert code == 1
    assert any("WRONG" in line and name in line for line in out.splitlines())
    assert len(err.splitlines()) == 1
    assert "computes something else than the CPU (" in err
    assert name in err
    assert "do not train on it" in err


def test_a_step_with_a_fault_in_its_program(results, monkeypatch):
    """Not the result but the step itself: its loss leaves out half of the tokens on the last device."""
    real = device_check.make_rows

    def fewer():
        batch = real()
        return batch._replace(weight=batch.weight * (np.arange(batch.weight.shape[1]) % 2))

    right, place = results[jax.devices()[0]], jax.devices()[-1]
    monkeypatch.setattr(device_check, "make_rows", fewer)
    faulty = device_check.run_step(place, "float32")
    monkeypatch.setattr(device_check, "run_step", lambda where, _: faulty if where == place else right[0])
    monkeypatch.setattr(device_check, "run_decode", lambda _: right[1])
    wrong = {difference.name for difference in check_device(place, jax.devices()[0]).wrong}
    assert {"float32 loss", "float32 gradient"} <= wrong


def test_another_backend_is_one_sentence(check, capsys, monkeypatch):
    monkeypatch.setattr("jaxtrl.hardware.replica_groups.try_small_groups", lambda _: GroupTrial((), "it hangs"))
    assert neuron.main(["check"]) == 1
    shown = capsys.readouterr()
    assert "then they fail: it hangs; meshes with one axis above 1 only" in shown.out
    assert "JAX runs on cpu here, not on neuron" in shown.err
