"""Collectives over some of the devices: tried in a child process, and mixed meshes are refused where they fail."""

import sys

import pytest

from jaxtrl.hardware import replica_groups
from jaxtrl.hardware.replica_groups import GroupTrial, check_mesh, is_mixed, try_small_groups


def test_they_work_on_virtual_devices(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    assert try_small_groups() == GroupTrial((2,), None)


def test_a_hang_ends_at_the_time_limit():
    child = "import time; print('ok 2', flush=True); time.sleep(60)"
    trial = try_small_groups(2.0, [sys.executable, "-c", child])
    assert trial == GroupTrial((2,), "nothing came back within 2 s")
    assert not trial.is_mixed_mesh_possible


def test_a_wrong_result_is_told():
    child = "print('ok 2'); raise RuntimeError('groups of 4 devices give a wrong result (inner)')"
    trial = try_small_groups(60.0, [sys.executable, "-c", child])
    assert trial.sizes == (2,)
    assert trial.failure == "RuntimeError: groups of 4 devices give a wrong result (inner)"


def test_what_a_mixed_mesh_is():
    assert is_mixed({"data": 2, "fsdp": 2})
    assert not is_mixed({"data": 4, "fsdp": 1, "tensor": 1})
    assert not is_mixed({})


def test_only_a_mixed_mesh_is_tried_and_refused(monkeypatch):
    calls = []
    monkeypatch.setattr(replica_groups, "try_small_groups", lambda: calls.append(0) or GroupTrial((), "it hangs"))
    check_mesh({"data": 4, "tensor": 1})
    assert not calls
    with pytest.raises(ValueError, match=r"mesh data=2, tensor=2 needs collectives .* fail here \(it hangs\)"):
        check_mesh({"data": 2, "fsdp": 1, "tensor": 2})
