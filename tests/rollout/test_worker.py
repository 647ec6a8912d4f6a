"""The worker's process: its end when the trainer is killed or interrupted, its heartbeat while it compiles or hangs."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxtrl.rollout.worker import Beat, _Status

TRAINER = """
import signal, sys, time
from pathlib import Path

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with SIGINT ignored
if __name__ == "__main__":
    from jaxtrl.model.qwen3 import model_params
    from jaxtrl.rollout.pacing import Pacing
    from jaxtrl.rollout.workers import LocalWorkers
    from tests.rollout.models import fixture_t
    from tests.rollout.rewards_for_tests import first_token, make_prompts, make_setup

    pacing = Pacing(2, 10**6, 1)
    rollout = LocalWorkers(make_setup(first_token), pacing, make_prompts(5), weights_folder=Path(sys.argv[1]))
    try:
        rollout.start(model_params(fixture_t()), 0, 0, ())
        rollout.take(2)
        print("worker", rollout._workers[0].process.pid, flush=True)
        while True:
            time.sleep(0.1)
    finally:
        rollout.close()
        print("closed", flush=True)
"""


@pytest.fixture
def trainer(tmp_path):
    """A trainer whose worker has sampled: (process, process id of the worker, folder of the weights)."""
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER, encoding="utf-8")
    root = Path(__file__).parents[2]
    command = [sys.executable, str(script), str(tmp_path / "weights")]
    environment = os.environ | {"PYTHONPATH": str(root)}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, env=environment, cwd=root, start_new_session=True, text=True
    )
    word, pid = process.stdout.readline().split()
    assert word == "worker"
    yield process, int(pid), tmp_path / "weights"
    process.kill()
    process.stdout.close()
    process.wait()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(") ", 1)[1][0] != "Z"
    except OSError:
        return False


def wait_until_gone(pid: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} still runs after {seconds} s"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("stopped", [False, True], ids=["running worker", "stopped worker"])
def test_a_killed_trainer_leaves_no_worker_and_no_weights(trainer, stopped):
    process, worker, weights = trainer
    assert len(list(weights.iterdir())) == 1
    if stopped:
        os.kill(worker, signal.SIGSTOP)
    process.kill()
    wait_until_gone(worker, 5)
    assert list(weights.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_ctrl_c_ends_trainer_and_worker_cleanly(trainer):
    """The whole foreground group is interrupted, as a terminal does it."""
    process, worker, weights = trainer
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert out.splitlines() == ["closed"]
    assert process.returncode in (-signal.SIGINT, 128 + signal.SIGINT, 1)
    assert not is_running(worker)
    assert list(weights.iterdir()) == []


def test_the_heartbeat_tells_a_hung_call_from_compiling_and_from_waiting():
    status = _Status(0)
    assert status.beat(50) == Beat(0.0, {})  # before there is a sampler, everything is imports and compiling
    programs = SimpleNamespace(compiling=True)
    engine = SimpleNamespace(programs=programs)
    status.producer = SimpleNamespace(sampler=SimpleNamespace(engine=engine), counters={"tokens": 3.0})
    assert status.beat(50) == Beat(0.0, {"tokens": 3.0})
    programs.compiling = False
    assert [status.beat(0.5).stuck for _ in range(3)] == [0.5, 1.0, 1.5]
    status.rounds += 1
    assert [status.beat(0.5).stuck for _ in range(2)] == [0, 0.5]
    status.is_waiting = True
    assert status.beat(0.5).stuck == 0
