"""Published weights: exact, whole or absent, damage is named, the disk may be full."""

import errno
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxtrl.model.qwen3 import model_params
from jaxtrl.rollout import weights
from jaxtrl.rollout.weights import WeightsFolder, params_nbytes, read_weights
from tests.rollout.models import fixture_t


@pytest.fixture(scope="module")
def params():
    return model_params(fixture_t())


def leaves(tree):
    return jax.tree_util.tree_flatten_with_path(tree)[0]


def test_float32_is_exact(params, tmp_path):
    folder = WeightsFolder(params_nbytes(params), tmp_path / "new")
    path = folder.write(params, 7)
    read = read_weights(path)
    assert [p for p, _ in leaves(read)] == [p for p, _ in leaves(params)]
    for (_, a), (_, b) in zip(leaves(read), leaves(params), strict=True):
        assert type(a) is np.ndarray
        assert a.dtype == np.float32
        np.testing.assert_array_equal(a, b)
    assert not list(folder.folder.rglob("*.partial"))
    folder.close()
    assert list((tmp_path / "new").iterdir()) == []


def test_bfloat16_is_rounded_and_half_as_large(params, tmp_path):
    folder = WeightsFolder(0, tmp_path, "bfloat16")
    path = folder.write(params, 0)
    for (_, a), (_, b) in zip(leaves(read_weights(path)), leaves(params), strict=True):
        assert a.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(a, b.astype(jnp.bfloat16))
    assert params_nbytes(params, "bfloat16") < path.stat().st_size < params_nbytes(params)
    with pytest.raises(ValueError, match="'float16': it must be float32 or bfloat16"):
        WeightsFolder(0, tmp_path, "float16")


def test_old_versions_are_removed_and_mapped_ones_stay_readable(params, tmp_path):
    folder = WeightsFolder(0, tmp_path)
    paths = [folder.write(params, version) for version in (9, 10, 11)]
    read = read_weights(paths[0])
    folder.remove_before(11)
    assert [path.exists() for path in paths] == [False, False, True]
    np.testing.assert_array_equal(read["embed_tokens"], params["embed_tokens"])
    with pytest.raises(FileNotFoundError, match=re.escape(str(paths[0]))):
        read_weights(paths[0])


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_truncated_file_is_named(params, tmp_path, keep):
    folder = WeightsFolder(0, tmp_path)
    path = folder.write(params, 3)
    content = path.read_bytes()
    path.write_bytes(content[:keep])
    with pytest.raises(ValueError, match=f"{re.escape(str(path))} is (truncated|corrupt)"):
        read_weights(path)


def test_a_full_disk_names_folder_and_bytes_and_leaves_no_part(params, tmp_path, monkeypatch):
    def write_tensors(folder, specs, arrays, max_shard_size):
        (folder / "model.safetensors.partial").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    folder = WeightsFolder(0, tmp_path)
    folder.write(params, 1)
    monkeypatch.setattr(weights, "write_tensors", write_tensors)
    sentence = f"weights of version 2 need {params_nbytes(params):,} bytes in {folder.folder}, which is full"
    with pytest.raises(OSError, match=re.escape(sentence)):
        folder.write(params, 2)
    assert sorted(path.name for path in folder.folder.iterdir()) == ["000000000001", "lock"]


def test_a_full_device_is_that_error_too(params, tmp_path):
    """/dev/full says ENOSPC to every write."""
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this system")
    folder = WeightsFolder(0, tmp_path)
    (folder.folder / "000000000004").mkdir()
    (folder.folder / "000000000004" / "model.safetensors.partial").symlink_to("/dev/full")
    with pytest.raises(OSError, match="weights of version 4 need"):
        folder.write(params, 4)


def test_shared_memory_is_used_where_it_has_room(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "SHARED_MEMORY", tmp_path)
    small, large = WeightsFolder(1000), WeightsFolder(2**60)
    assert small.folder.parent == tmp_path
    assert large.folder.parent != tmp_path
    small.close()
    large.close()


def test_folders_of_killed_trainers_are_removed_and_those_in_use_are_not(tmp_path):
    used, abandoned = WeightsFolder(0, tmp_path), WeightsFolder(0, tmp_path)
    abandoned._lock.close()  # as the system does when a process is killed
    new = WeightsFolder(0, tmp_path)
    assert set(tmp_path.iterdir()) == {used.folder, new.folder}
