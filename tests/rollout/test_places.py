"""Where workers run: cores shared evenly, environments per platform, nothing left behind in the trainer."""

import os
import signal

import pytest

from jaxtrl.rollout.places import Place, inherited, parse_cores, worker_places


def test_cpu_cores_are_affinities():
    cpu = {"JAX_PLATFORMS": "cpu"}
    assert worker_places("cpu", 2) == [Place(cpu), Place(cpu)]
    assert worker_places("cpu", 2, "2-5") == [Place(cpu, frozenset({2, 3})), Place(cpu, frozenset({4, 5}))]


def test_devices_are_environment_variables():
    assert [p.environment for p in worker_places("gpu", 2, "1,3")] == [
        {"CUDA_VISIBLE_DEVICES": "1"},
        {"CUDA_VISIBLE_DEVICES": "3"},
    ]


def test_devices_of_one_process_must_be_given():
    with pytest.raises(ValueError, match="rollout workers on gpu need devices of their own: say which"):
        worker_places("gpu", 1)
    with pytest.raises(ValueError, match=r"rollout workers on neuron .* set neuron_instance and rollout_cores"):
        worker_places("neuron", 3, "1-3")
    with pytest.raises(ValueError, match=r"rollout workers on tpu .* use rollout=inline"):
        worker_places("tpu", 1)
    with pytest.raises(ValueError, match="'0-2' are 3, which 2 workers cannot share evenly"):
        worker_places("cpu", 2, "0-2")


@pytest.mark.parametrize("cores", ["", "a", "1-", "1,1", "3-2", "-1"])
def test_what_is_no_list_of_cores(cores):
    with pytest.raises(ValueError, match="cores are"):
        parse_cores(cores)


def test_lists_and_ranges():
    assert parse_cores("0, 2-4") == [0, 2, 3, 4]


def test_the_trainer_is_as_before(monkeypatch):
    monkeypatch.setenv("JAXTRL_A", "old")
    before = os.sched_getaffinity(0)
    core = min(before)
    with inherited(Place({"JAXTRL_A": "new", "JAXTRL_B": "1"}, frozenset({core}))):
        assert (os.environ["JAXTRL_A"], os.environ["JAXTRL_B"]) == ("new", "1")
        assert os.sched_getaffinity(0) == {core}
        assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert os.environ["JAXTRL_A"] == "old"
    assert "JAXTRL_B" not in os.environ
    assert os.sched_getaffinity(0) == before
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
