"""Small GRPO runs: a tiny Qwen3 with the bundled tokenizer's vocabulary, on sums."""

from flax import nnx

from jaxtrl.model.config import Qwen3Config
from jaxtrl.model.qwen3 import Qwen3
from jaxtrl.train.mesh import make_mesh
from jaxtrl.trainers.grpo_config import AsyncGRPOConfig
from jaxtrl.trainers.grpo_trainer import AsyncGRPOTrainer
from tests import fixture_t

PROMPTS = [
    {"prompt": [{"role": "user", "content": f"What is {a} + {b}?"}], "answer": str(a + b)}
    for a, b in ((1, 2), (3, 4), (5, 2), (2, 2), (8, 1), (4, 4))
]


def tiny_model(vocab_size, seed=0):
    fields = {**fixture_t.CONFIG, "vocab_size": vocab_size, "eos_token_id": None}
    return Qwen3(Qwen3Config.from_dict(fields), rngs=nnx.Rngs(seed))


def even_ids(completion_ids, **_):
    """The share of even token ids: a reward that a random model gets some of."""
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]


def make_trainer(folder, tokenizer, cache, reward=even_ids, trainer=None, **options):
    """A trainer of steps on 2 groups of 4 completions; keyword arguments of the trainer go in `trainer={...}`."""
    defaults = {
        "rollout": "inline",
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 6,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "rollout_slots": 8,
        "compile_cache": cache,
    }
    args = AsyncGRPOConfig(output_dir=str(folder), **{**defaults, **options})
    arguments = {"train_dataset": PROMPTS, "processing_class": tokenizer, "mesh": make_mesh(1), **(trainer or {})}
    model = arguments.pop("model", None) or tiny_model(len(tokenizer))
    return AsyncGRPOTrainer(model, reward, args, **arguments)
