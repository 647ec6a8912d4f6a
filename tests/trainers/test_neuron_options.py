"""Options that Neuron needs: the environment before JAX starts, buffers that are not donated, rows of 128 tokens."""

import os
import subprocess
import sys

import jax
import pytest

from jaxtrl.hardware import replica_groups
from jaxtrl.hardware.replica_groups import GroupTrial
from jaxtrl.rows.batch import ShapeClass
from jaxtrl.rows.ladder import ShapeSet
from jaxtrl.train.compiled import Programs
from jaxtrl.trainers import command as command_module
from jaxtrl.trainers.command import start_neuron
from jaxtrl.trainers.grpo_config import AsyncGRPOConfig
from jaxtrl.trainers.sft_config import SFTConfig
from jaxtrl.trainers.sft_steps import SFTSteps
from jaxtrl.trainers.steps import make_adamw
from tests.trainers.conftest import tiny_qwen3

COMMAND = """
import os, runpy, sys
sys.modules["libneuronxla"] = sys.modules["os"]  # a machine that has the plugin
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: find("os") if name == "libneuronxla" else find(name, *rest)

class Stop:
    def find_spec(self, name, *rest):
        if name == "jax":  # the environment as JAX finds it
            print(os.environ["NEURON_RT_VISIBLE_CORES"], os.environ["JAX_PLATFORMS"], os.environ["NEURON_CC_FLAGS"])
            sys.exit(7)

sys.meta_path.insert(0, Stop())
sys.argv = ["sft", "--output_dir", sys.argv[1], *sys.argv[2:]]
runpy.run_module("jaxtrl.sft", run_name="__main__")
"""


def command(folder, *flags):
    names = ("JAX_PLATFORMS", "NEURON_CC_FLAGS", "NEURON_RT_VISIBLE_CORES")
    env = {name: value for name, value in os.environ.items() if name not in names}
    return subprocess.run(
        [sys.executable, "-c", COMMAND, str(folder), *flags], env=env, capture_output=True, text=True, timeout=120
    )


def test_the_command_sets_the_environment_before_jax_is_imported(tmp_path):
    done = command(tmp_path, "--neuron_instance", "trn2.3xlarge", "--neuron_cores", "2", "--compile_effort", "high")
    assert done.returncode == 7, done.stderr
    assert done.stdout.split()[:2] == ["2", "neuron,cpu"]
    assert done.stdout.split()[-1] == "-O2"


def test_a_set_of_cores_that_is_not_allowed_is_refused_before_jax_is_imported(tmp_path):
    done = command(tmp_path / "out", "--neuron_instance", "trn2.3xlarge", "--neuron_cores", "0-2")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "python -m jaxtrl.sft: error: neuron_cores: cores 0-2 are 3, which a job on trn2.3xlarge may not have: "
        "allowed are 0, 1, 2, 3; 0-3"
    ]
    assert not (tmp_path / "out").exists()


def test_a_trainer_made_after_jax_says_that_it_is_too_late(make_trainer, monkeypatch):
    monkeypatch.setattr("jaxtrl.hardware.environment.has_plugin", lambda: True)
    monkeypatch.delenv("JAX_PLATFORMS")
    with pytest.raises(ValueError, match="JAX was imported before"):
        make_trainer(neuron_instance="trn2.3xlarge")


@pytest.mark.parametrize(("mesh", "tried"), [("fsdp=2,tensor=2", True), ("fsdp=4", False)])
def test_a_mixed_mesh_is_tried_before_jax_starts(monkeypatch, mesh, tried):
    """In the order of a command: environment first, then the trial in a child process, JAX last."""
    steps = []
    monkeypatch.setattr(command_module, "set_environment", lambda *_, **__: steps.append("environment"))
    monkeypatch.setattr(replica_groups, "try_small_groups", lambda: steps.append("trial") or GroupTrial((), "hangs"))
    args = SFTConfig(neuron_instance="trn2.3xlarge", mesh=mesh)
    start_neuron(args)  # JAX is there: the cores are taken
    assert steps == ["environment"]
    monkeypatch.delitem(sys.modules, "jax")
    if tried:
        with pytest.raises(ValueError, match="collectives over some of the devices, which fail here"):
            start_neuron(args)
    else:
        start_neuron(args)
    assert steps[1:] == ["environment", *(["trial"] if tried else [])]


def grpo(**options):
    return AsyncGRPOConfig(neuron_instance="trn2.3xlarge", neuron_cores=0, **options)


def test_rollout_workers_have_cores_of_their_own():
    places = grpo(rollout_workers=3, rollout_cores="1-3", compile_cache="/c").worker_environments()
    assert [place["NEURON_RT_VISIBLE_CORES"] for place in places] == ["1", "2", "3"]
    assert {place["JAX_PLATFORMS"] for place in places} == {"neuron,cpu"}
    assert grpo(rollout="inline").worker_environments() is None
    assert AsyncGRPOConfig().worker_environments() is None


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"rollout_cores": "0-3", "rollout_workers": 4},
            "rollout_cores: the trainer and the rollout workers both have",
        ),
        ({"rollout_cores": "1-3", "rollout_workers": 2}, "rollout_cores: cores 1-3 cannot be shared equally by 2"),
        ({"rollout_cores": "2-3"}, "rollout_cores: cores 2-3 are 2, which a job on trn2.3xlarge may not have"),
        ({}, "rollout_cores: name the workers' NeuronCores"),
    ],
)
def test_cores_that_workers_may_not_have(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        grpo(**options)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_donation_is_a_switch(accumulate):
    donated = {}
    for donate in (True, False):
        args = SFTConfig(donate_buffers=donate, gradient_accumulation_steps=accumulate)
        steps = SFTSteps(tiny_qwen3().config, args, None, Programs())
        steps.prepare_training(make_adamw(args, 10)[0])
        jobs = steps.train_jobs([ShapeClass(128, 128, 128, 2)])
        lowered = {job.kind: job.function.lower(*job.args) for job in jobs}
        donated[donate] = {
            kind: sum(leaf.donated for leaf in jax.tree.leaves(one.args_info)) for kind, one in lowered.items()
        }
    assert all(count > 0 for kind, count in donated[True].items() if kind != "zeros")
    assert not any(donated[False].values())


@pytest.mark.parametrize("rule", ["auto", "none", 64, 100])
def test_every_row_size_is_a_multiple_of_128(rule):
    shapes = ShapeSet.from_setting(rule)
    assert {shapes.token_class(length) % 128 for length in range(1, 3000, 37)} == {0}
