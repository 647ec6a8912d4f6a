"""The persistent cache: on by default, movable, switched off; on Neuron only the compiler's own."""

import os
import subprocess
import sys

import jax
import pytest

from jaxtrl.hardware import compile_cache

JOB = """
import sys
import jax, jax.numpy as jnp
jax.jit(lambda x: x - 1)(1.0)  # a compile before the cache is enabled must not switch it off for good
from jaxtrl.hardware.compile_cache import enable_compile_cache
from jaxtrl.train.compiled import Programs
print(enable_compile_cache(sys.argv[1]))
programs = Programs()
result = programs.call("f", (3,), jax.jit(lambda x: jnp.tanh(x @ x).sum()), jnp.ones((64, 64)))
print(float(result), programs.count, programs.from_cache)
"""


def run(setting, env):
    environment = {**os.environ, **env}
    done = subprocess.run([sys.executable, "-c", JOB, str(setting)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    where, result = done.stdout.splitlines()
    return where, result.split()


def test_second_process_loads_what_the_first_compiled(tmp_path):
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    env_dir = str(tmp_path / "jaxtrl" / "xla")
    first, second = run("auto", env), run("auto", env)
    assert first[0] == second[0] == env_dir
    assert first[1][1:] == ["1", "0"]
    assert second[1] == [first[1][0], "1", "1"]


def test_moved_and_off(tmp_path):
    env = {"XDG_CACHE_HOME": str(tmp_path / "unused")}
    assert run(tmp_path / "mine", env)[0] == str(tmp_path / "mine")
    assert any((tmp_path / "mine").iterdir())
    assert run("off", env)[0] == "None"
    assert run("off", env)[1][2] == "0"
    assert not (tmp_path / "unused").exists()


def test_jax_own_variable_is_respected(tmp_path):
    assert run("auto", {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "own")})[0] == str(tmp_path / "own")


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be written"):
        compile_cache.enable_compile_cache(str(tmp_path / "file" / "cache"))


@pytest.fixture
def neuron(monkeypatch):
    enabled = jax.config.jax_enable_compilation_cache
    for name in ("NEURON_COMPILE_CACHE_URL", "NEURON_CC_FLAGS"):
        monkeypatch.setenv(name, "")  # recorded, so that it is taken back after the test
        monkeypatch.delenv(name)
    yield monkeypatch
    jax.config.update("jax_enable_compilation_cache", enabled)


def test_neuron_uses_the_compilers_cache_and_never_jax_own(neuron):
    assert compile_cache.enable_compile_cache("auto", "neuron") == "/var/tmp/neuron-compile-cache"
    assert not jax.config.jax_enable_compilation_cache
    assert compile_cache.enable_compile_cache("s3://bucket/cache", "neuron") == "s3://bucket/cache"
    assert os.environ["NEURON_COMPILE_CACHE_URL"] == "s3://bucket/cache"
    assert compile_cache.enable_compile_cache("auto", "neuron") == "s3://bucket/cache"
    assert compile_cache.enable_compile_cache("off", "neuron") is None
    assert os.environ["NEURON_CC_FLAGS"] == "--no-cache"
