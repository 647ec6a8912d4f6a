"""A GRPO loop of your own on the sampler and the pure step function, without the trainer.

    python examples/custom_grpo_loop.py

A tiny Qwen3 with random weights is rewarded for even token ids: half of what it draws at first, nearly all at the end.
"""

import numpy as np
from flax import nnx

from jaxtrl import (
    Qwen3,
    Qwen3Config,
    Sampler,
    SamplingParams,
    TrainState,
    make_grpo_step,
    make_optimizer,
    tree_rows,
)
from jaxtrl.rows.advantages import group_advantages, normalise_row
from jaxtrl.rows.batch import Sample, ShapeClass, make_batch

STEPS, PROMPTS, GENERATIONS, NEW_TOKENS, VOCABULARY = 30, 4, 8, 12, 64
TOKEN_BUDGET = 512  # distinct tokens of a row: every row has this one shape, so the step compiles once
SHAPE = ShapeClass(tokens=TOKEN_BUDGET, slots=512, terms=512, lanes=6)

model = Qwen3(
    Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        eos_token_id=1,
    ),
    rngs=nnx.Rngs(0),
)
sampler = Sampler(model, slots=PROMPTS * GENERATIONS, max_length=32, tokens_per_call=NEW_TOKENS)
optimizer = make_optimizer(3e-3, STEPS, schedule="constant")
state = TrainState.create(model, optimizer)
step = make_grpo_step(model.config, optimizer, loss_type="dapo", donate=False)  # the sampler reads the parameters too
draw = np.random.default_rng(0)

for i in range(STEPS):
    prompts = draw.integers(2, VOCABULARY, (PROMPTS, 4)).tolist()
    params = SamplingParams(max_new_tokens=NEW_TOKENS, seed=i)
    completions = sampler.generate(prompts, params, num_generations=GENERATIONS)
    rewards = np.array([np.mean(completion.token_ids % 2 == 0) for completion in completions])
    advantages = group_advantages(rewards.reshape(PROMPTS, GENERATIONS)).ravel()
    samples = []
    for completion, advantage in zip(completions, advantages.tolist(), strict=True):
        prompt = prompts[completion.prompt_index]
        ids = np.array([*prompt, *completion.token_ids], np.int32)
        old_logp = np.concatenate([np.zeros(len(prompt), np.float32), completion.logps])
        trained = np.arange(len(ids)) >= len(prompt)
        samples.append(Sample(ids, trained, advantage, old_logp, group=completion.prompt_index))
    # A prompt stands once in its row, whatever number of completions it has. Several rows would be micro-batches.
    rows = [normalise_row(row, "dapo") for row in tree_rows(samples, TOKEN_BUDGET)]
    state, metrics = step(state, *[make_batch([row], SHAPE) for row in rows])
    sampler.update_params(state.params, version=i + 1)
    if i % 5 == 0 or i == STEPS - 1:
        print(f"step {i:3d}  reward {rewards.mean():.3f}  ratio {float(metrics['ratio']):.6f}  tokens in rows", end=" ")
        print(f"{sum(len(row.input_ids) for row in rows)} of {sum(len(sample.input_ids) for sample in samples)}")
