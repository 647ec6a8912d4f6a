"""Counted transfers: by hand for small programs, and those of the sharded train step against its compiled HLO."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrl.model.config import Qwen3Config
from jaxtrl.planning.collectives import Collective, Volume, count_collectives, count_in_hlo, wire_bytes, without_axes
from jaxtrl.rows.batch import ShapeClass
from jaxtrl.train.compiled import Programs
from jaxtrl.train.mesh import make_mesh
from jaxtrl.trainers.sft_config import SFTConfig
from jaxtrl.trainers.sft_steps import SFTSteps
from jaxtrl.trainers.steps import make_adamw

LAYERS = 5


def layered(mesh):
    """Five layers, each gathering an [8, 8] float32 matrix and adding up a [4, 8] product, and one sum at the end."""

    def layer(x, w):
        return lax.psum(x @ lax.all_gather(w, "fsdp", axis=0, tiled=True), "tensor"), None

    def body(x, w):
        x, _ = lax.scan(layer, x, w)
        return lax.psum((x * x).sum(), ("fsdp", "tensor"))

    inner = jax.shard_map(body, mesh=mesh, in_specs=(P("tensor"), P(None, "fsdp")), out_specs=P(), check_vma=False)
    return jax.jit(lambda x, w: inner(x, w))


@pytest.fixture(scope="module")
def program():
    mesh = make_mesh(1, 2, 2)
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh, P("tensor")))
    w = jax.ShapeDtypeStruct((LAYERS, 8, 8), jnp.float32, sharding=NamedSharding(mesh, P(None, "fsdp")))
    return layered(mesh).trace(x, w)


EXPECTED = {
    Collective("all-gather", ("fsdp",), 2, "float32"): Volume(LAYERS, LAYERS * 8 * 8 * 4),
    Collective("all-reduce", ("tensor",), 2, "float32"): Volume(LAYERS, LAYERS * 4 * 8 * 4),
    Collective("all-reduce", ("fsdp", "tensor"), 4, "float32"): Volume(1, 4),
}


def test_layers_of_a_scan_count_each(program):
    assert count_collectives(program.jaxpr) == EXPECTED


def test_compiled_hlo_says_the_same(program):
    assert count_in_hlo(program.lower().compile().as_text()) == without_axes(EXPECTED)


def test_bytes_of_a_ring():
    volume = Volume(1, 1000)
    assert wire_bytes(Collective("all-gather", (), 4, "float32"), volume) == 750
    assert wire_bytes(Collective("reduce-scatter", (), 4, "float32"), volume) == 750
    assert wire_bytes(Collective("all-reduce", (), 4, "float32"), volume) == 1500


def test_a_group_of_one_transfers_nothing():
    mesh = make_mesh(1, 1, 1)
    total = jax.shard_map(lambda x: lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P())
    assert count_collectives(jax.jit(total).trace(jnp.ones(4)).jaxpr) == {}


HLO = """\
HloModule m

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]) parameter(0)
  %g = f32[16]{0} all-gather(%x), channel_id=1, replica_groups=[2,2]<=[4], dimensions={0}
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %w = (s32[], f32[8]) while(%t), condition=%cond, body=%body
  %r = (bf16[4]{0}, bf16[2,2]{1,0}) all-reduce(%a, %b), replica_groups={{0,1,2,3}}, to_apply=%sum
  %n = f32[3]{0} all-reduce(%a), replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}, to_apply=%sum
  %s = f32[2]{0} reduce-scatter(%a), replica_groups={{0,1},{2,3}}, dimensions={0}, to_apply=%sum
}
"""


def test_hlo_text():
    known = HLO.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"7"}}')
    assert count_in_hlo(known) == {
        Collective("all-gather", (), 2, "float32"): Volume(7, 7 * 64),
        Collective("all-reduce", (), 4, "bfloat16"): Volume(2, 16),
        Collective("all-reduce", (), 4, "float32"): Volume(1, 12),
        Collective("reduce-scatter", (), 2, "float32"): Volume(1, 16),
    }
    with pytest.raises(ValueError, match="a loop of unknown length"):
        count_in_hlo(HLO)


CONFIG = Qwen3Config(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=16,
    tie_word_embeddings=False,
)


def large(volumes):
    """Bytes of float32 arrays by kind and group. Small ones are XLA's own: sums for the optimizer's global norm."""
    of_floats = {found: volume for found, volume in without_axes(volumes).items() if found.dtype == "float32"}
    return {(found.kind, found.group): volume.bytes for found, volume in of_floats.items() if volume.bytes > 8192}


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 4, 1), (2, 2, 1), (1, 2, 2)], ids=["fsdp=4", "data=2,fsdp=2", "fsdp=2,tensor=2"])
def test_the_train_step_transfers_what_its_compiled_program_does(sizes):
    args = SFTConfig(bf16=False)
    steps = SFTSteps(CONFIG, args, make_mesh(*sizes), Programs())
    steps.prepare_training(make_adamw(args, 10)[0])
    (job,) = steps.train_jobs([ShapeClass(128, 128, 128, 1)])
    traced = job.function.trace(*job.args)
    counted = large(count_collectives(traced.jaxpr))
    compiled = large(count_in_hlo(traced.lower().compile().as_text()))
    assert counted.keys() == compiled.keys()
    for key, size in counted.items():
        assert size == pytest.approx(compiled[key], rel=0.02), key


def test_gathers_of_a_layer_are_its_parameters():
    """fsdp=4: each layer is gathered in the forward and in the backward pass, and its gradient scattered once."""
    args = SFTConfig(bf16=False)
    steps = SFTSteps(CONFIG, args, make_mesh(1, 4), Programs())
    steps.prepare_training(make_adamw(args, 10)[0])
    (job,) = steps.train_jobs([ShapeClass(128, 128, 128, 1)])
    found = without_axes(count_collectives(job.function.trace(*job.args).jaxpr))
    matrices = sum(
        int(np.prod(leaf.shape)) * 4
        for path, leaf in jax.tree_util.tree_leaves_with_path(job.args[0].params["layers"])
        if path[-1].key == "kernel"
    )
    tables = 2 * CONFIG.vocab_size * CONFIG.hidden_size * 4
    gathered = found[Collective("all-gather", (), 4, "float32")].bytes
    scattered = found[Collective("reduce-scatter", (), 4, "float32")].bytes
    assert 2 * matrices <= gathered <= 2 * matrices + 4 * tables
    assert matrices <= scattered <= matrices + 2 * tables
