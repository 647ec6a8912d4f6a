"""The persistent cache: on by default, movable, switched off; on Neuron only the compiler's own."""

import os
import subprocess
import sys
import zlib

import jax
import pytest

from jaxtrl.hardware import compile_cache

JOB = """
import sys, warnings
warnings.simplefilter("error")
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


def test_an_entry_cut_short_by_a_kill_is_removed_and_written_anew(tmp_path):
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    folder = tmp_path / "jaxtrl" / "xla"
    first = run("auto", env)
    entries = sorted(folder.glob("*-cache"))
    whole = {path: path.read_bytes() for path in entries}
    for path in entries:
        path.write_bytes(whole[path][: len(whole[path]) // 2])
    again = run("auto", env)  # a warning of JAX would be an error here: see JOB
    assert again[1] == [first[1][0], "1", "0"]
    assert {path: path.read_bytes()[:2] for path in entries} == {path: data[:2] for path, data in whole.items()}
    assert run("auto", env)[1] == [first[1][0], "1", "1"]


def test_only_new_entries_are_checked(tmp_path):
    entry = zlib.compress(b"program" * 1000)
    for name, data in {"a-cache": entry, "b-cache": entry[:-1], "c-cache": b"", "other": b""}.items():
        (tmp_path / name).write_bytes(data)
    assert [path.name for path in compile_cache.remove_broken(tmp_path)] == ["b-cache", "c-cache"]
    (tmp_path / "a-cache").write_bytes(entry[:9])
    os.utime(tmp_path / "a-cache", (1, 1))  # older than the check
    (tmp_path / "d-cache").write_bytes(entry[:9])
    assert [path.name for path in compile_cache.remove_broken(tmp_path)] == ["d-cache"]
    assert {path.name for path in tmp_path.iterdir()} == {"a-cache", "other", compile_cache.CHECKED}


def test_compile_effort_sets_the_compilers_level_unless_one_is_given(neuron):
    compile_cache.set_compile_effort("high", "cpu")
    assert "NEURON_CC_FLAGS" not in os.environ
    compile_cache.set_compile_effort("low", "neuron")
    assert os.environ["NEURON_CC_FLAGS"] == "-O1"
    neuron.setenv("NEURON_CC_FLAGS", "--model-type transformer")
    compile_cache.set_compile_effort("high", "neuron")
    assert os.environ["NEURON_CC_FLAGS"] == "--model-type transformer -O2"
    compile_cache.set_compile_effort("low", "neuron")
    assert os.environ["NEURON_CC_FLAGS"] == "--model-type transformer -O2"
