"""`python -m jaxtrl.plan --model_shape`: a step on devices that are not here."""

import json
import os
import subprocess
import sys

import pytest

from jaxtrl import plan
from jaxtrl.hardware.cores import INSTANCES
from jaxtrl.hardware.links import LINKS, Link, link_of
from jaxtrl.model.qwen3 import abstract_params
from jaxtrl.planning.mesh_plan import MODELS, model_config
from jaxtrl.planning.options import PlanConfig

BILLIONS = {"0.6b": 0.596, "1.7b": 1.72, "4b": 4.02, "8b": 8.19, "14b": 14.77, "32b": 32.76}  # of the published models


@pytest.mark.parametrize("name", MODELS)
def test_the_shapes_are_those_of_the_published_models(name):
    import jax

    count = sum(leaf.size for leaf in jax.tree.leaves(abstract_params(model_config(name))))
    assert count / 1e9 == pytest.approx(BILLIONS[name], rel=0.005)


def test_links():
    mesh = {"data": 4, "fsdp": 16, "tensor": 4}
    name = "trn2.48xlarge"
    assert link_of(name, mesh, ("tensor",)) == Link("chip", 2.9e12 / 8)
    assert link_of(name, mesh, ("fsdp",)) == Link("NeuronLink", 256e9)
    assert link_of(name, mesh, ("fsdp", "tensor")) == Link("NeuronLink", 256e9)
    assert link_of(name, mesh, ("data",)) == Link("EFA", 6.25e9)
    assert link_of(name, {"data": 1, "fsdp": 4, "tensor": 1}, ("data", "fsdp")).name == "chip"
    with pytest.raises(ValueError, match=r"more than 4 devices needs several trn2\.3xlarge"):
        link_of("trn2.3xlarge", {"data": 8}, ("data",))
    assert LINKS.keys() == INSTANCES.keys()


def test_options():
    with pytest.raises(ValueError, match="instance: it belongs to a simulation"):
        PlanConfig(instance="trn2.48xlarge")
    choices = PlanConfig.__dataclass_fields__["model_shape"].metadata["choices"]
    assert set(choices) == set(MODELS)


@pytest.mark.slow
def test_a_simulation(tmp_path, capsys):
    flags = ["--model_shape=0.6b", "--mesh=fsdp=4,tensor=2", "--max_length=256", "--per_device_train_batch_size=2"]
    assert plan.main([*flags, f"--output_dir={tmp_path}"]) == 0
    found = json.loads((tmp_path / "mesh_plan.json").read_text())
    assert (found["devices"], found["instances"], found["row_tokens"]) == (8, 1, 512)
    memory, step = found["memory"], found["step"]
    parameters = 4 * 0.596e9
    assert memory["parameters"] == pytest.approx(parameters / 8, rel=0.01)
    assert memory["optimizer"] == pytest.approx(2 * parameters / 8, rel=0.01)
    assert memory["fits"]
    kinds = {(row["kind"], tuple(row["axes"]), row["dtype"]): row for row in found["transfers"]}
    layers = 2 * 440.4e6 / 2  # bfloat16 matrices of all layers, half of each for tensor=2
    assert kinds["all-gather", ("fsdp",), "bfloat16"]["bytes"] >= 2 * layers
    assert kinds["all-reduce", ("tensor",), "bfloat16"]["link"] == "chip"
    seconds = step["compute_seconds"] + sum(row["seconds"] for row in found["transfers"])
    assert step["seconds"]["apart"] == pytest.approx(seconds)
    assert 0 < step["scaling_efficiency"]["apart"] < step["scaling_efficiency"]["overlapped"] <= 1
    assert "what a device sends in a step" in capsys.readouterr().out


@pytest.mark.slow
def test_the_largest_model_as_a_command_takes_little_time_and_memory(tmp_path):
    code = """
import resource, sys, time
from jaxtrl import plan
start = time.process_time()
code = plan.main(sys.argv[1:])
print(code, time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
"""
    flags = ["--model_shape=32b", "--mesh=data=2,fsdp=16,tensor=4", "--per_device_train_batch_size=1"]
    command = [sys.executable, "-c", code, *flags, "--max_length=4096", "--output_dir", str(tmp_path)]
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}  # which says 8 devices here
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    code, seconds, gib = map(float, done.stdout.split()[-3:])
    assert code == 0, done.stderr
    assert seconds < 120
    assert gib < 4
    assert json.loads((tmp_path / "mesh_plan.json").read_text())["instances"] == 2
