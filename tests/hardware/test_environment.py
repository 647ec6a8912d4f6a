"""The environment on Neuron: which variables for which options, and that no harmful one is ever among them."""

import os
import subprocess
import sys
from itertools import product

import pytest

from jaxtrl.hardware import environment
from jaxtrl.hardware.cores import INSTANCES
from jaxtrl.hardware.environment import (
    Processes,
    cores_of,
    neuron_environment,
    neuron_processes,
    set_environment,
    worker_environments,
)


def variables(instance="trn2.3xlarge", cores=range(4), given=(), **options):
    return neuron_environment(instance, cores, given=dict(given), **options)


def test_a_trainer_on_a_whole_trn2():
    assert variables() == {
        "JAX_PLATFORMS": "neuron,cpu",
        "NEURON_RT_VISIBLE_CORES": "0-3",
        "NEURON_LOGICAL_NC_CONFIG": "2",
        "NEURON_CC_FLAGS": "--model-type transformer --target trn2 --distribution-strategy llm-training -lnc 2 -O1",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "NEURON_COMPILE_CACHE_URL": "/var/tmp/neuron-compile-cache",
    }


def test_a_rollout_worker_and_trn1():
    found = variables("trn1.32xlarge", range(31, 32), role="rollout", compile_effort="high", compile_cache="s3://a/b")
    assert found["NEURON_RT_VISIBLE_CORES"] == "31"
    assert "NEURON_LOGICAL_NC_CONFIG" not in found
    assert found["NEURON_CC_FLAGS"] == "--model-type transformer --target trn1 -O2"
    assert found["NEURON_COMPILE_CACHE_URL"] == "s3://a/b"


def test_what_the_user_says_wins():
    given = {"NEURON_CC_FLAGS": "--target=trn1 -O3 --lnc-hint", "NEURON_COMPILE_CACHE_URL": "/mine"}
    found = variables(given=given.items())
    assert found["NEURON_CC_FLAGS"].startswith("--target=trn1 -O3 --lnc-hint --model-type transformer")
    assert "trn2" not in found["NEURON_CC_FLAGS"]
    assert "-O1" not in found["NEURON_CC_FLAGS"]
    assert found["NEURON_COMPILE_CACHE_URL"] == "/mine"
    assert variables(given=given.items(), compile_cache="/other")["NEURON_COMPILE_CACHE_URL"] == "/other"


def test_no_cache():
    found = variables(compile_cache="off")
    assert found["NEURON_CC_FLAGS"].endswith("--no-cache")
    assert "NEURON_COMPILE_CACHE_URL" not in found


def test_several_hosts():
    found = variables("trn2.48xlarge", range(64), processes=Processes("10.0.0.1:41001", 2, 1))
    assert found["NEURON_RT_ROOT_COMM_ID"] == "10.0.0.1:41000"
    assert found["NEURON_PJRT_PROCESSES_NUM_DEVICES"] == "64,64"
    assert found["NEURON_PJRT_PROCESS_INDEX"] == "1"
    assert (found["FI_PROVIDER"], found["FI_EFA_USE_DEVICE_RDMA"], found["FI_EFA_FORK_SAFE"]) == ("efa", "1", "1")
    assert int(found["NEURON_RT_EXEC_TIMEOUT"]) > 30


@pytest.mark.parametrize(
    ("processes", "sentence"),
    [
        (Processes("host", 2, 0), "coordinator_address 'host': expected host:port"),
        (Processes("host:41001", 2, 2), "process_id 2 of 2 processes"),
    ],
)
def test_wrong_processes(processes, sentence):
    with pytest.raises(ValueError, match=sentence):
        variables(processes=processes)


def test_never_a_variable_that_harms():
    several = Processes("a:41001", 2, 0)
    for instance, role, effort, cache, processes in product(
        INSTANCES, environment.ROLES, ("low", "high"), ("auto", "off", "/x"), (None, several)
    ):
        found = variables(
            instance, range(1), role=role, compile_effort=effort, compile_cache=cache, processes=processes
        )
        assert environment.TRIVIAL_ON_CPU not in found
        assert found["JAX_PLATFORMS"] == "neuron,cpu"  # neuron alone leaves no CPU backend
        assert not {"JAX_COMPILATION_CACHE_DIR", "NEURON_RT_NUM_CORES", "NEURON_RT_STOCHASTIC_ROUNDING_EN"} & set(found)
        assert "auto-cast" not in found["NEURON_CC_FLAGS"]


def test_options_mean_cores():
    assert cores_of("trn2.3xlarge", None) == range(4)
    assert cores_of("trn2.3xlarge", 2) == range(2, 3)
    with pytest.raises(ValueError, match="are 2, which"):
        cores_of("trn2.3xlarge", "0-1")


def test_workers_beside_a_trainer():
    found = worker_environments("trn2.3xlarge", 0, "1-3", 3, compile_cache="/c")
    assert [each["NEURON_RT_VISIBLE_CORES"] for each in found] == ["1", "2", "3"]
    assert "llm-training" not in found[0]["NEURON_CC_FLAGS"]
    with pytest.raises(ValueError, match="the trainer and the rollout workers both have cores 1-3"):
        worker_environments("trn2.3xlarge", None, "1-3", 3)


@pytest.fixture
def clean(monkeypatch):
    for name in [*variables("trn2.48xlarge", range(64), processes=Processes("a:2", 1, 0)), environment.TRIVIAL_ON_CPU]:
        monkeypatch.setenv(name, "")  # recorded, so that it is taken back after the test
        monkeypatch.delenv(name)
    monkeypatch.setattr(environment, "has_plugin", lambda: True)
    monkeypatch.delitem(sys.modules, "jax")
    return monkeypatch


def test_set_before_jax(clean):
    assert set_environment(None) == {}
    assert "NEURON_RT_VISIBLE_CORES" not in os.environ
    set_environment("trn2.3xlarge", "0-3")
    assert os.environ["NEURON_RT_VISIBLE_CORES"] == "0-3"
    assert os.environ["JAX_PLATFORMS"] == "neuron,cpu"
    set_environment("trn2.3xlarge", "0-3")  # a second time changes nothing
    clean.setitem(sys.modules, "jax", object())
    set_environment("trn2.3xlarge", "0-3")  # nor is it late where all is set already
    with pytest.raises(ValueError, match=r"NEURON_RT_VISIBLE_CORES is 0-3, but the options for trn2.3xlarge mean 2"):
        set_environment("trn2.3xlarge", 2)


def test_too_late(clean):
    clean.setitem(sys.modules, "jax", object())
    with pytest.raises(ValueError, match="JAX was imported before"):
        set_environment("trn2.3xlarge")
    assert "NEURON_RT_VISIBLE_CORES" not in os.environ


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("JAX_PLATFORMS", "cpu", "JAX_PLATFORMS is cpu, but the options for trn2.3xlarge mean neuron,cpu"),
        ("NEURON_LOGICAL_NC_CONFIG", "1", "NEURON_LOGICAL_NC_CONFIG is 1"),
        (environment.TRIVIAL_ON_CPU, "1", "unset it"),
    ],
)
def test_the_users_variables_must_agree(clean, name, value, sentence):
    clean.setenv(name, value)
    with pytest.raises(ValueError, match=sentence):
        set_environment("trn2.3xlarge")


def test_a_machine_without_the_plugin(clean):
    clean.setattr(environment, "has_plugin", lambda: False)
    with pytest.raises(ValueError, match="JAX has no Neuron plugin here"):
        set_environment("trn2.3xlarge")


def test_importing_it_starts_nothing():
    code = "import sys, jaxtrl.hardware.environment; print([m for m in ('jax', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_processes_of_the_variables_are_those_that_the_environment_was_made_for():
    processes = Processes("10.0.0.1:1234", 2, 1)
    given = neuron_environment("trn2.48xlarge", range(64), processes=processes, given={})
    assert neuron_processes(given) == processes
    assert neuron_processes({}) is None
    del given["NEURON_RT_ROOT_COMM_ID"]
    with pytest.raises(ValueError, match="NEURON_RT_ROOT_COMM_ID"):
        neuron_processes(given)
