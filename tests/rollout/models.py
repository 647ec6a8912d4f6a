"""Models of the rollout tests: fixture T and others of its formula."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrl.model.config import Qwen3Config
from jaxtrl.model.hf import params_from_hf
from jaxtrl.model.qwen3 import Qwen3, model_graphdef
from tests.golden.formula_qwen3 import make_config, tensors


def make_model(dtype: Any = jnp.float32, **changes: Any) -> Qwen3:
    """Fixture T with 1,024 positions, or with other fields."""
    fields = make_config(**changes)
    config = Qwen3Config.from_dict(fields)
    params = params_from_hf(config, tensors(fields))
    return nnx.merge(model_graphdef(config), jax.tree.map(lambda x: jnp.asarray(x, dtype), params))


@cache
def fixture_t() -> Qwen3:
    return make_model()
