"""`python -m jaxtrl.neuron`: the environment that it prints is what a shell gets, and wrong input is one sentence."""

import os
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxtrl import neuron
from jaxtrl.hardware import neuron_compiler
from jaxtrl.planning import programs
from jaxtrl.planning.programs import DeviceProgram, sampler_programs

CONFIGS = Path(__file__).parents[1] / "configs"
X = jax.ShapeDtypeStruct((8, 16), jnp.float32)


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


def lint_of(function, *flags, monkeypatch, capsys):
    """Exit code, stdout and stderr of `lint` where this is the only program."""
    monkeypatch.setattr(programs, "all_programs", lambda: [DeviceProgram("planted", jax.jit(function), (X,))])
    code = neuron.main(["lint", *flags])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def sorting(x):
    return jnp.sort(x)


def test_lint_names_program_operation_and_line(monkeypatch, capsys):
    code, out, err = lint_of(sorting, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 1
    assert "planted: not for Neuron" in out
    assert "test_neuron.py:" in out
    assert "(sorting): sort: use bisection" in out
    assert err == "python -m jaxtrl.neuron: error: 1 programs are not for Neuron, see above\n"


def test_lint_of_a_clean_program(monkeypatch, capsys):
    assert lint_of(lambda x: x + 1, monkeypatch=monkeypatch, capsys=capsys)[:2] == (0, "planted: clean\n")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.name for path in CONFIGS.glob("*.yaml")))
def test_every_configuration_is_clean(name, capsys):
    assert neuron.main(["lint", "--config", str(CONFIGS / name)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines
    assert all(line.endswith(": clean") for line in lines)
    if name == "sft_trn2.yaml":
        assert all("on 4 devices" in line and "bfloat16" in line for line in lines)


def test_the_configurations_own_options_are_used(tmp_path, capsys, monkeypatch):
    lines = "loss_type: dft\nbf16: false\ngradient_checkpointing: false\ncompile_effort: high\neval_on_start: true\n"
    (tmp_path / "own.yaml").write_text(f"{lines}neuron_instance: trn1.2xlarge\n")
    monkeypatch.setattr("jaxtrl.hardware.neuron.lint", lambda *_: [])  # what is lowered is another test's matter
    assert neuron.main(["lint", "--config", str(tmp_path / "own.yaml")]) == 0
    train, evaluation = capsys.readouterr().out.splitlines()
    assert train.startswith("sft dft float32 matmuls, unrolled train")
    assert "eval" in evaluation
    assert train.endswith("on 2 devices: clean")


def test_a_wrong_configuration_is_one_sentence(tmp_path, capsys):
    (tmp_path / "own.yaml").write_text("loss_typ: dft\n")
    assert neuron.main(["lint", "--config", str(tmp_path / "own.yaml")]) == 1
    assert "own.yaml line 1: unknown key 'loss_typ'; did you mean 'loss_type'?" in capsys.readouterr().err


def test_the_sampler_has_all_its_programs():
    names = [program.name for program in sampler_programs("float32")]
    assert {name.split()[2] for name in names} == {"weights", "prefill", "insert", "decode"}
    assert sum("filtered=True" in name for name in names) == sum("filtered=False" in name for name in names) == 1


@pytest.fixture
def fake_compiler(tmp_path, monkeypatch):
    """fake_compiler(script) puts a neuronx-cc on PATH that notes its arguments, keeps its input and runs the script."""

    def make(script):
        path = tmp_path / "bin" / "neuronx-cc"
        path.parent.mkdir()
        path.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\ncp "$4" {tmp_path}/input\n{script}\n')
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.delenv("NEURON_CC_FLAGS", raising=False)
        return tmp_path

    return make


def test_the_compiler_gets_the_program(fake_compiler, monkeypatch, capsys):
    folder = fake_compiler('printf 1234 > "$6"')
    code, out, _ = lint_of(lambda x: jnp.tanh(x), "--compiler", monkeypatch=monkeypatch, capsys=capsys)
    assert code == 0
    assert "neuronx-cc: " in out
    arguments = (folder / "arguments").read_text().split()
    assert arguments[:3] == ["compile", "--framework", "XLA"]
    assert arguments[4] == "--output"
    assert {"--target", "trn2", "-lnc", "2", "-O1"} <= set(arguments)
    module = (folder / "input").read_bytes()
    assert b"tanh" in module


@pytest.mark.parametrize(
    ("script", "sentence"),
    [("echo first; echo 'no such operation' >&2; exit 3", "fails: exit code 3: no such operation"), ("", "wrote no")],
)
def test_a_program_that_does_not_compile(fake_compiler, monkeypatch, capsys, script, sentence):
    fake_compiler(script)
    code, out, _ = lint_of(lambda x: x + 1, "--compiler", monkeypatch=monkeypatch, capsys=capsys)
    assert code == 1
    assert sentence in out


def test_without_the_compiler(monkeypatch, capsys):
    monkeypatch.setattr(neuron_compiler.shutil, "which", lambda _: None)
    code, out, err = lint_of(lambda x: x + 1, "--compiler", monkeypatch=monkeypatch, capsys=capsys)
    assert (code, out) == (1, "")
    assert "neuronx-cc is not installed here" in err


@pytest.mark.slow
def test_all_programs_of_jaxtrl_are_clean(capsys):
    assert neuron.main(["lint"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.endswith(": clean") for line in lines)
    for name in ("train", "zeros", "accumulate", "update", "eval", "score", "prefill", "insert", "decode", "weights"):
        assert any(f" {name}" in line for line in lines), name
    assert {line.split()[0] for line in lines} == {"sft", "grpo", "sampler"}
