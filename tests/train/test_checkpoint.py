"""Checkpoints: bitwise round trip, atomic folders, and an error wherever Orbax would cast or fill in (case C17)."""

import shutil
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from jaxtrl.model.config import Qwen3Config
from jaxtrl.model.qwen3 import init_params
from jaxtrl.train.checkpoint import (
    CheckpointError,
    CheckpointWriter,
    find_checkpoints,
    read_metadata,
    remove_leftovers,
    restore,
)
from jaxtrl.train.mesh import make_mesh, param_shardings
from jaxtrl.train.optimizer import make_optimizer
from jaxtrl.train.state import TrainState, state_shardings
from tests.fixture_t import CONFIG


class State(NamedTuple):
    step: jax.Array
    params: dict
    opt_state: tuple


def make_state(layers: int = 4, step=16777217, dtype=jnp.float32, width: int = 3) -> State:
    values = np.random.default_rng(layers).standard_normal((layers, width), np.float32)
    params = {"layers": {"mlp": {"kernel": jnp.asarray(values, dtype)}}, "norm": jnp.ones(width, jnp.bfloat16)}
    return State(jnp.asarray(step), params, optax.adamw(1e-3).init(params))


def weights(array):
    return {"step": jnp.int32(0), "params": {"w": array}}


def write(folder, state, step=1, metadata=None, **kwargs):
    writer = CheckpointWriter(folder, **kwargs)
    path = writer.save(step, state, metadata or {})
    writer.close()
    return path


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def test_another_mesh_than_the_one_that_saved(tmp_path):
    """Cut in eight, then in four otherwise, then whole: the same bits on each mesh."""
    config, optimizer = Qwen3Config.from_dict(CONFIG), make_optimizer(1e-3, 10)
    params = init_params(config, 0)
    cut = jax.device_put(params, param_shardings(params, make_mesh(1, 4, 2)))
    state = TrainState.create(cut, optimizer)
    state = state._replace(opt_state=jax.tree.map(lambda x: x + 3, state.opt_state))
    path = write(tmp_path, state)
    for mesh in (make_mesh(2, 2, 1), make_mesh(1, 1, 2), make_mesh(1)):
        shardings = state_shardings(config, optimizer, mesh)
        like = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings)
        restored = restore(path, like)
        assert_same(restored, state)
        assert jax.tree.map(lambda x: x.sharding, restored) == shardings


def test_round_trip_is_bitwise(tmp_path):
    state = make_state()
    metadata = {"loss": 0.1 + 0.2, "history": [{"a": 1}], "nothing": None}
    path = write(tmp_path, state, 7, {"trainer_state": metadata, "run": {}})
    assert path == tmp_path / "checkpoint-7"
    assert read_metadata(path, "trainer_state") == metadata
    assert read_metadata(path, "run") == {}
    assert_same(restore(path, state), state)
    abstract = jax.eval_shape(lambda: make_state())
    assert_same(restore(path, abstract), state)


def test_plain_orbax_reads_it(tmp_path):
    state = make_state()
    path = write(tmp_path, state)
    params = ocp.StandardCheckpointer().restore(path / "params")
    np.testing.assert_array_equal(params["layers"]["mlp"]["kernel"], state.params["layers"]["mlp"]["kernel"])


def test_files_of_the_model_lie_in_it(tmp_path):
    path = write(tmp_path, make_state(), files={"config.json": b"{}"})
    assert (path / "config.json").read_bytes() == b"{}"
    assert {"config.json", "params", "state"} <= {file.name for file in path.iterdir()}


def test_saved_values_are_those_of_the_call_although_the_state_is_donated(tmp_path):
    """The write goes on in the background while the next steps overwrite (donate) the arrays."""
    double = jax.jit(lambda s: jax.tree.map(lambda x: x * 2, s), donate_argnums=0)
    state = weights(jnp.arange(3_000_000, dtype=jnp.float32))
    writer = CheckpointWriter(tmp_path)
    for step in range(3):
        writer.save(step, state, {})
        for _ in range(2):
            state = double(state)
    writer.close()
    for step in range(3):
        saved = restore(tmp_path / f"checkpoint-{step}", state)["params"]["w"]
        np.testing.assert_array_equal(saved, np.arange(3_000_000, dtype=np.float32) * 4.0**step)


@pytest.mark.parametrize(
    ("like", "expected"),
    [
        (lambda: make_state(layers=2), r"kernel is float32\[4, 3\] in the checkpoint and float32\[2, 3\] here"),
        (lambda: make_state(step=jnp.float32(0)), r"step is int32\[\] in the checkpoint and float32\[\] here"),
        (lambda: make_state(width=5), r"\[4, 3\] in the checkpoint and float32\[4, 5\] here"),
        (lambda: make_state(dtype=jnp.bfloat16), r"float32\[4, 3\] in the checkpoint and bfloat16\[4, 3\] here"),
        (lambda: make_state()._replace(opt_state=optax.sgd(1e-3).init({})), r"opt_state/0/.* and absent here"),
        (lambda: make_state()._replace(params={"extra": jnp.ones(2)}), r"params/extra is absent in the checkpoint"),
    ],
    ids=["layers", "step dtype", "shape", "param dtype", "fewer arrays", "other arrays"],
)
def test_c17_restoring_into_anything_else_is_an_error(tmp_path, like, expected):
    path = write(tmp_path, make_state())
    with pytest.raises(CheckpointError, match=expected):
        restore(path, like())


def test_large_integers_survive(tmp_path):
    state = make_state(step=16777217)
    assert int(restore(write(tmp_path, state), state).step) == 16777217


def test_newest_complete_one_is_found_in_numeric_order(tmp_path):
    for step in (9, 100, 20):
        write(tmp_path, make_state(1), step)
    (tmp_path / "checkpoint-200").mkdir()  # empty: not a checkpoint
    (tmp_path / "checkpoint-best").mkdir()
    assert [path.name for path in find_checkpoints(tmp_path)] == ["checkpoint-9", "checkpoint-20", "checkpoint-100"]


def test_what_a_killed_run_left_is_ignored_and_removed(tmp_path):
    """Orbax's temporary folder holds everything but the rename; a folder being deleted has been renamed first."""
    write(tmp_path, make_state(), 4)
    shutil.copytree(tmp_path / "checkpoint-4", tmp_path / "checkpoint-5.orbax-checkpoint-tmp")
    shutil.copytree(tmp_path / "checkpoint-4", tmp_path / "checkpoint-3.removed")
    assert [path.name for path in find_checkpoints(tmp_path)] == ["checkpoint-4"]
    assert sorted(remove_leftovers(tmp_path)) == ["checkpoint-3.removed", "checkpoint-5.orbax-checkpoint-tmp"]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-4"]


def test_the_final_name_appears_only_with_everything_in_it(tmp_path):
    """Watch the folder while a larger state is written: at its first sight the checkpoint can be restored."""
    state = weights(jnp.arange(5_000_000, dtype=jnp.float32))
    writer = CheckpointWriter(tmp_path)
    writer.save(1, state, {"run": {"a": 1}})
    seen_temporary = False
    while not (tmp_path / "checkpoint-1").exists():
        names = [path.name for path in tmp_path.iterdir()]
        seen_temporary |= "checkpoint-1.orbax-checkpoint-tmp" in names
        assert find_checkpoints(tmp_path) == [] or (tmp_path / "checkpoint-1").exists()
    assert seen_temporary
    assert read_metadata(tmp_path / "checkpoint-1", "run") == {"a": 1}
    assert_same(restore(tmp_path / "checkpoint-1", state), state)
    writer.close()


def test_limit_keeps_the_newest_and_the_best_and_touches_no_other_run(tmp_path):
    write(tmp_path, make_state(1), 1)
    writer = CheckpointWriter(tmp_path, limit=2)
    for step in (2, 4, 6, 8, 10):
        writer.save(step, make_state(1), {}, keep=4)
    writer.close()
    assert [path.name for path in find_checkpoints(tmp_path)] == [f"checkpoint-{n}" for n in (1, 4, 8, 10)]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"checkpoint-{n}" for n in (1, 4, 8, 10))


def test_a_resumed_run_counts_its_earlier_checkpoints(tmp_path):
    for step in (2, 4):
        write(tmp_path, make_state(1), step)
    write(tmp_path, make_state(1), 6, limit=1, steps=(2, 4))
    assert [path.name for path in find_checkpoints(tmp_path)] == ["checkpoint-6"]


def test_the_same_step_is_written_anew(tmp_path):
    write(tmp_path, weights(jnp.zeros(2)), 3)
    path = write(tmp_path, weights(jnp.ones(2)), 3)
    np.testing.assert_array_equal(restore(path, weights(jnp.zeros(2)))["params"]["w"], [1, 1])
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]


def test_missing_and_damaged_checkpoints_are_named(tmp_path):
    state = make_state()
    with pytest.raises(CheckpointError, match=r"There is no checkpoint at .*checkpoint-9"):
        restore(tmp_path / "checkpoint-9", state)
    (tmp_path / "checkpoint-8").mkdir()
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        read_metadata(tmp_path / "checkpoint-8", "run")
    path = write(tmp_path, state)
    shutil.rmtree(path / "params" / "d")
    with pytest.raises(CheckpointError, match="is damaged and cannot be read"):
        restore(path, state)
    (path / "run.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"run\.json cannot be read"):
        read_metadata(path, "run")


def test_values_that_are_not_json_fail_in_the_call(tmp_path):
    """Before a checkpoint of that step is replaced."""
    path = write(tmp_path, make_state(), 1)
    writer = CheckpointWriter(tmp_path)
    with pytest.raises(TypeError, match="not JSON serializable"):
        writer.save(1, make_state(), {"x": np.float32(1)})
    writer.close()
    assert find_checkpoints(tmp_path) == [path]


def test_limit_must_be_positive(tmp_path):
    with pytest.raises(ValueError, match="save_total_limit"):
        CheckpointWriter(tmp_path, limit=0)


def test_a_disk_without_room_is_said_before_anything_is_written(tmp_path, monkeypatch):
    writer = CheckpointWriter(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10**9, 10**9 - 7, 7))
    with pytest.raises(CheckpointError, match=r"checkpoint-3 needs \d+ bytes but the disk has 7 left"):
        writer.save(3, make_state(), {})
    writer.close()
    assert not list(tmp_path.iterdir())
