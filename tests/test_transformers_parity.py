"""Logits, loss and gradients against Transformers: stored numbers, and live where torch is installed."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxtrl.model.config import Qwen3Config
from jaxtrl.model.hf import params_from_hf, params_to_hf
from jaxtrl.model.qwen3 import model_graphdef
from jaxtrl.rows.batch import Sample, concat_rows, pad_visible
from jaxtrl.rows.blocks import block_tables
from tests.fixture_t import R1, R1_NLL, R2, R2_NLL, values
from tests.golden.formula_qwen3 import make_config, tensors

GOLDEN = json.loads((Path(__file__).parent / "golden" / "transformers.json").read_text(encoding="utf-8"))
VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "bias": {"attention_bias": True},
}
BLOCK = 4


def make_loss(fields: dict[str, Any], rows: list[list[int]]):
    """Jitted (params, weight [T]) -> ((weighted sum of token NLLs, logits [n, V]), gradient) of one packed row."""
    config = Qwen3Config.from_dict(fields)
    row = concat_rows([Sample(np.array(ids, np.int32), np.ones(len(ids), bool)) for ids in rows])
    size = (len(row.input_ids) // BLOCK + 2) * BLOCK
    padding = size - len(row.input_ids)
    visible = pad_visible(row.visible_until, size)
    arrays = np.pad(row.input_ids, (0, padding)), np.pad(row.position_ids, (0, padding)), visible
    tables = block_tables(visible, BLOCK)
    graphdef = model_graphdef(config)

    def loss(params, weight):
        model = nnx.merge(graphdef, params)
        logits = model(*arrays, tables) @ model.head_weight().T
        picked = jax.nn.log_softmax(logits[row.slot_index])[np.arange(len(row.slot_target)), row.slot_target]
        return -(picked * weight).sum(), logits

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def start_params(fields: dict[str, Any]) -> dict[str, Any]:
    return jax.tree.map(jnp.asarray, params_from_hf(Qwen3Config.from_dict(fields), tensors(fields)))


@cache
def variant_outputs(variant: str) -> dict[str, tuple[np.ndarray, float, dict[str, np.ndarray]]]:
    """Logits, mean NLL and Hugging Face name -> gradient of r1 and r2, both from one row that packs the two."""
    fields = make_config(**VARIANTS[variant])
    function, params = make_loss(fields, [R1, R2]), start_params(fields)
    first, second = len(R1) - 1, len(R2) - 1
    out = {}
    for name, weight, tokens in (
        ("r1", np.r_[np.ones(first) / first, np.zeros(second)], slice(0, len(R1))),
        ("r2", np.r_[np.zeros(first), np.ones(second) / second], slice(len(R1), len(R1) + len(R2))),
    ):
        (loss, logits), gradient = function(params, weight.astype(np.float32))
        named = dict(params_to_hf(Qwen3Config.from_dict(fields), gradient))
        out[name] = np.asarray(logits)[tokens], float(loss), named
    return out


@pytest.fixture(params=[f"{variant} {row}" for variant in VARIANTS for row in ("r1", "r2")])
def case(request) -> tuple[dict[str, Any], tuple]:
    variant, row = request.param.split()
    return GOLDEN[request.param], variant_outputs(variant)[row]


def test_golden_numbers_are_those_of_the_fixture():
    assert GOLDEN["tied r1"]["loss"] == pytest.approx(np.mean(R1_NLL), abs=1e-5)
    assert GOLDEN["tied r2"]["loss"] == pytest.approx(np.mean(R2_NLL), abs=1e-5)


def test_logits(case):
    golden, (logits, _, _) = case
    np.testing.assert_allclose(logits, np.array(golden["logits"]), rtol=1e-5, atol=1e-5)


def test_loss(case):
    golden, (_, loss, _) = case
    assert loss == pytest.approx(golden["loss"], rel=1e-5)


def test_gradients(case):
    """Norm of each gradient, and its projection on a fixed direction (a transposed gradient has the same norm)."""
    golden, (_, _, gradients) = case
    assert sorted(gradients) == sorted(golden["gradients"])
    for j, name in enumerate(sorted(gradients)):
        norm, projection = golden["gradients"][name]
        gradient = gradients[name].astype(np.float64)
        assert np.linalg.norm(gradient) == pytest.approx(norm, rel=1e-5), name
        direction = values(300 + j, gradient.shape).astype(np.float64)
        tolerance = 1e-5 * norm * float(np.linalg.norm(direction))
        assert (gradient * direction).sum() == pytest.approx(projection, abs=tolerance), name


@pytest.mark.torch
@pytest.mark.parametrize("variant", VARIANTS)
def test_live(variant):
    """The same against the Transformers that is installed, on a longer row of random ids and other shapes."""
    torch = pytest.importorskip("torch")
    from tests.golden.make_trl_golden import build

    fields = make_config(vocab_size=80, hidden_size=24, head_dim=8, num_attention_heads=6, num_hidden_layers=3)
    fields |= VARIANTS[variant]
    # Not id 0: Transformers leaves the input embedding of the padding token without a gradient.
    ids = np.random.default_rng(0).integers(1, 80, 29).tolist()
    (loss, logits), gradient = make_loss(fields, [ids])(start_params(fields), np.full(28, 1 / 28, np.float32))
    gradients = dict(params_to_hf(Qwen3Config.from_dict(fields), gradient))
    reference = build(fields)
    output = reference(input_ids=torch.tensor([ids]), labels=torch.tensor([ids]))
    output.loss.backward()
    np.testing.assert_allclose(logits[:29], output.logits[0].detach().numpy(), rtol=1e-5, atol=2e-5)
    assert float(loss) == pytest.approx(output.loss.item(), rel=1e-5)
    for name, parameter in reference.named_parameters():
        expected = parameter.grad.numpy()
        error = np.linalg.norm(gradients[name] - expected)
        assert error <= 1e-5 * np.linalg.norm(expected) + 1e-7, name
