"""Does a device compute what the CPU computes? One SFT step and one generation on both, with their differences.

Runtime faults of Neuron devices have been silent (a gather that returned zeros), so this is worth a minute before a
run. A small model with every kind of layer; the same programs as the trainers'.
"""

import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrl.model.config import Qwen3Config
from jaxtrl.model.qwen3 import Qwen3, init_params, model_graphdef
from jaxtrl.rollout.requests import Completion, SamplingParams
from jaxtrl.rollout.sampler import Sampler
from jaxtrl.rows.batch import RowBatch, Sample, concat_rows, make_batch
from jaxtrl.rows.ladder import ShapeSet
from jaxtrl.train.optimizer import make_optimizer
from jaxtrl.train.state import TrainState
from jaxtrl.train.step import make_sft_step

CONFIG = Qwen3Config(
    vocab_size=2048,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    tie_word_embeddings=False,
    initializer_range=0.1,  # logits that tell tokens apart
)
# What rounding may change: float32 sums in another order, products of bfloat16 numbers likewise. Faults are far above.
ALLOWED = {"float32": 1e-3, "bfloat16": 5e-2}


class Difference(NamedTuple):
    """A result on the device beside the CPU's: how far apart, relative to the CPU's, and how far it may be."""

    name: str
    value: float
    allowed: float

    @property
    def is_right(self) -> bool:
        return self.value <= self.allowed  # NaN is not


class Compiled(NamedTuple):
    """Seconds that a program took to compile."""

    name: str
    device: float
    reference: float


class Outcome(NamedTuple):
    """Of one device."""

    differences: list[Difference]
    compiled: list[Compiled]

    @property
    def wrong(self) -> list[Difference]:
        return [difference for difference in self.differences if not difference.is_right]


class StepResult(NamedTuple):
    """Of loss, gradient and update on one device, as NumPy arrays; seconds of compiling by program."""

    loss: float
    grad_norm: float
    gradients: Any
    params: Any
    seconds: dict[str, float]


def check_device(device: Any, reference: Any) -> Outcome:
    """Compares `device` with `reference`, a CPU. Raises nothing for a difference: see `Outcome.wrong`."""
    differences, compiled = [], []
    for dtype in ALLOWED:
        own, right = (run_step(place, dtype) for place in (device, reference))
        allowed = ALLOWED[dtype]
        differences += [
            Difference(f"{dtype} loss", _distance([own.loss], [right.loss]), allowed),
            Difference(f"{dtype} gradient norm", _distance([own.grad_norm], [right.grad_norm]), allowed),
            Difference(f"{dtype} gradient", _tree_distance(own.gradients, right.gradients), allowed),
            Difference(f"{dtype} updated parameters", _tree_distance(own.params, right.params), ALLOWED["float32"]),
        ]
        compiled += [Compiled(f"{dtype} {name}", s, right.seconds[name]) for name, s in own.seconds.items()]
    (own_tokens, own_seconds), (right_tokens, right_seconds) = (run_decode(place) for place in (device, reference))
    differences += compare_completions(own_tokens, right_tokens)
    compiled += [Compiled(f"sampler {kind}", own_seconds[kind], right_seconds[kind]) for kind in own_seconds]
    return Outcome(differences, compiled)


def run_step(device: Any, dtype: str) -> StepResult:
    """One optimizer step on a device. The update starts from given gradients, so that rounding of small ones, which
    AdamW divides by their own size, is not taken for a fault."""
    params = init_params(CONFIG, 0)
    optimizer = make_optimizer(1e-3, 10, schedule="constant", weight_decay=0.1)
    step = make_sft_step(CONFIG, optimizer, dtype=jnp.dtype(dtype), donate=False)
    on_device = jax.device_put((params, make_rows()), device)
    compiler = _Compiler()
    zeros = compiler.run("zeros", step.init, on_device[0])
    acc = compiler.run("accumulate", step.accumulate, on_device[0], zeros, on_device[1])
    rng = np.random.default_rng(1)
    given = jax.tree.map(lambda x: rng.standard_normal(x.shape, np.float32), params)
    state = jax.device_put(TrainState.create(on_device[0], optimizer), device)
    known = acc._replace(gradients=jax.device_put(given, device))
    new, _ = compiler.run("update", step.apply, state, known)
    _, metrics = compiler.run("update", step.apply, state, acc)
    acc, metrics, changed = jax.tree.map(np.asarray, (acc, metrics, new.params))
    change = jax.tree.map(np.subtract, changed, params)
    return StepResult(float(metrics["loss"]), float(metrics["grad_norm"]), acc.gradients, change, compiler.seconds)


def make_rows() -> RowBatch:
    """A packed row of four samples."""
    rng = np.random.default_rng(0)
    samples = [Sample(rng.integers(0, CONFIG.vocab_size, n, dtype=np.int32), np.ones(n, bool)) for n in (90, 40, 7, 60)]
    row = concat_rows(samples)
    return make_batch([row], ShapeSet.from_setting("auto").classify([row]))


def run_decode(device: Any) -> tuple[list[Completion], dict[str, float]]:
    """Completions of three prompts in float32, drawn with the same numbers everywhere; seconds of compiling by kind."""
    model: Qwen3 = nnx.merge(model_graphdef(CONFIG), init_params(CONFIG, 0))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, CONFIG.vocab_size, n).tolist() for n in (5, 30, 12)]
    with jax.default_device(device):
        sampler = Sampler(model, slots=4, max_length=128, tokens_per_call=8, eos_token_id=())
        done = sampler.generate(prompts, SamplingParams(max_new_tokens=16, seed=1))
    seconds: dict[str, float] = {}
    for program in sampler.engine.programs.compiled:
        seconds[program.kind] = seconds.get(program.kind, 0.0) + program.seconds
    return done, seconds


def compare_completions(own: Iterable[Completion], right: Iterable[Completion]) -> list[Difference]:
    """The share of other tokens, and the largest difference of log-probs as far as the tokens are the same."""
    others = count = 0
    furthest = 0.0
    for mine, its in zip(own, right, strict=True):
        equal = np.cumprod(mine.token_ids == its.token_ids).astype(bool)
        others, count = others + int((~equal).sum()), count + len(equal)
        distance = np.abs(mine.logps - its.logps)[equal]
        furthest = max(furthest, float(distance.max(initial=0.0))) if np.isfinite(distance).all() else float("nan")
    return [
        Difference("sampled tokens that differ", others / max(count, 1), 0.0),
        Difference("their log-probs", furthest, ALLOWED["float32"]),
    ]


class _Compiler:
    """Compiles a function once and keeps the seconds."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._programs: dict[str, Any] = {}

    def run(self, name: str, function: Any, *args: Any) -> Any:
        if name not in self._programs:
            start = time.perf_counter()
            self._programs[name] = function.lower(*args).compile()
            self.seconds[name] = time.perf_counter() - start
        return self._programs[name](*args)


def _distance(own: Any, right: Any) -> float:
    """|own - right| / |right|; NaN where anything is not finite."""
    own, right = np.asarray(own, np.float64), np.asarray(right, np.float64)
    return float(np.linalg.norm(own - right) / np.linalg.norm(right))


def _tree_distance(own: Any, right: Any) -> float:
    """The largest of all arrays, so that a fault in a small one shows; NaN first."""
    distances = [_distance(a.ravel(), b.ravel()) for a, b in zip(*map(jax.tree.leaves, (own, right)), strict=True)]
    return float(np.max(distances))
