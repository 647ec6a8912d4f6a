"""`python -m jaxtrl.neuron`: the environment that it prints is what a shell gets, and wrong input is one sentence."""

import subprocess

import pytest

from jaxtrl import neuron


def exports(text):
    """What a shell that evaluates `text` has in its environment then."""
    script = f"{text}\nenv"
    done = subprocess.run(["bash", "-c", script], env={}, capture_output=True, text=True, check=True)
    found = dict(line.split("=", 1) for line in done.stdout.splitlines())
    return {name: value for name, value in found.items() if name.startswith(("NEURON", "JAX", "FI_"))}


@pytest.fixture
def env(capsys, monkeypatch):
    for name in ("NEURON_CC_FLAGS", "NEURON_COMPILE_CACHE_URL"):
        monkeypatch.delenv(name, raising=False)

    def run(*flags):
        code = neuron.main(["env", *flags])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


def test_env_is_for_a_shell(env):
    code, out, _ = env("--instance", "trn2.3xlarge", "--cores", "0-3")
    assert code == 0
    assert exports(out) == {
        "JAX_PLATFORMS": "neuron,cpu",
        "NEURON_RT_VISIBLE_CORES": "0-3",
        "NEURON_LOGICAL_NC_CONFIG": "2",
        "NEURON_CC_FLAGS": "--model-type transformer --target trn2 --distribution-strategy llm-training -lnc 2 -O1",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "NEURON_COMPILE_CACHE_URL": "/var/tmp/neuron-compile-cache",
    }


def test_env_of_workers(env):
    flags = "--instance trn2.3xlarge --role rollout --cores 1-3 --workers 3 --trainer_cores 0"
    code, out, _ = env(*flags.split())
    assert code == 0
    each = [exports(part)["NEURON_RT_VISIBLE_CORES"] for part in out.split("# worker ")[1:]]
    assert each == ["1", "2", "3"]


def test_env_of_several_hosts(env):
    flags = "--instance trn2.48xlarge --num_processes 4 --process_id 3 --coordinator_address 10.0.0.1:41001"
    found = exports(env(*flags.split())[1])
    assert found["NEURON_PJRT_PROCESSES_NUM_DEVICES"] == "64,64,64,64"
    assert found["NEURON_PJRT_PROCESS_INDEX"] == "3"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--instance trn2.3xlarge --cores 0-1", "allowed are 0, 1, 2, 3; 0-3"),
        ("--instance trn2.3xlarge --cores 1,3", "not contiguous"),
        ("--instance trn2.3xlarge --cores 0-3 --role rollout --workers 4 --trainer_cores 0", "both have cores 0"),
        ("--instance trn2.3xlarge --cores 1-3 --role rollout --workers 2", "cannot be shared equally by 2"),
        ("--instance trn2.3xlarge --role rollout", "--cores is missing"),
        ("--instance trn2.3xlarge --workers 2", "belong to --role rollout"),
        ("--instance trn2.48xlarge --num_processes 2", "--coordinator_address is missing"),
    ],
)
def test_env_refuses(env, flags, sentence):
    code, out, err = env(*flags.split())
    assert (code, out) == (1, "")
    assert sentence in err
    assert len(err.splitlines()) == 1
