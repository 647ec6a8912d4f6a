"""A supervised fine-tuning loop of your own on jaxtrl's pure step functions, without the trainer.

    python examples/custom_sft_loop.py [MODEL_FOLDER DATA.jsonl]

Without arguments it trains a tiny Qwen3 from scratch on the bundled sample chats.
"""

import sys

import numpy as np
from flax import nnx
from transformers import AutoTokenizer

from jaxtrl import Qwen3, Qwen3Config, TrainState, load_pretrained, make_eval_step, make_optimizer, make_sft_step
from jaxtrl.assets import sample_data_path, tokenizer_path
from jaxtrl.rows.batch import Sample, make_batch
from jaxtrl.rows.ladder import ShapeSet
from jaxtrl.rows.pack import pack_rows
from jaxtrl.rows.sources import load_source
from jaxtrl.rows.tokenize import TokenizeOptions, tokenize_dataset

TOKEN_BUDGET = 1024  # tokens per row: every row has this one shape, so each step function compiles once
STEPS = 40

if len(sys.argv) == 3:
    folder, data = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = load_pretrained(folder)
else:
    data = sample_data_path()
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path())
    model = Qwen3(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
        ),
        rngs=nnx.Rngs(0),
    )

# Data: chats -> token ids with a mask of trained tokens -> packed rows -> batches of one shape.
dataset, report = tokenize_dataset(load_source(data), tokenizer, TokenizeOptions(max_length=TOKEN_BUDGET))
print(report)
samples = [Sample(np.asarray(row["input_ids"], np.int32), np.asarray(row["loss_mask"], bool)) for row in dataset]
rows = pack_rows(samples, TOKEN_BUDGET)
shape = ShapeSet.from_setting(f"fixed:{TOKEN_BUDGET}").classify(rows)
held_out, rows = rows[:1], rows[1:]

# Steps are pure functions. `step(state, ...)` is `step.accumulate` for every micro-batch, then one `step.apply`.
optimizer = make_optimizer(3e-3, STEPS, schedule="cosine", warmup_steps=4)
state = TrainState.create(model, optimizer)
step = make_sft_step(model.config, optimizer)
evaluate = make_eval_step(model.config)

order = np.random.default_rng(0)
for i in range(STEPS):
    micro_batches = [make_batch([rows[j]], shape) for j in order.choice(len(rows), 2)]
    state, metrics = step(state, *micro_batches)
    if i % 10 == 0 or i == STEPS - 1:
        print(f"step {i:3d}  loss {float(metrics['loss']):.4f}  grad_norm {float(metrics['grad_norm']):.3f}")

sums = evaluate(state.params, make_batch(held_out, shape))
print(f"held-out loss {float(sums['loss_sum'] / sums['denominator']):.4f}")
