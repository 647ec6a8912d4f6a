"""Fine-tuning on agent trajectories that are stored as one row per turn: what turns have in common is computed once.

    python examples/tree_sft_agent_turns.py [MODEL_FOLDER TURNS.jsonl [MAX_LENGTH]]

A row holds the conversation so far (`prompt`) and the agent's next message (`completion`), so a trajectory of n turns
repeats its first turn n times. `packing_strategy="tree"` finds what rows share; the loss is that of the separate rows.
Without arguments it trains a tiny Qwen3 from scratch on made-up turns.
"""

import random
import sys

from flax import nnx
from transformers import AutoTokenizer

from jaxtrl import Qwen3, Qwen3Config, SFTConfig, SFTTrainer
from jaxtrl.assets import tokenizer_path


def made_up_turns(trajectories: int = 48, turns: int = 5) -> list[dict]:
    """Rows of an agent that keeps a running sum, with one system prompt for all."""
    rng, rows = random.Random(0), []
    for _ in range(trajectories):
        total, messages = 0, [{"role": "system", "content": "Keep the sum. Answer with the sum so far, nothing else."}]
        for _ in range(turns):
            number = rng.randrange(10)
            total += number
            messages = [*messages, {"role": "user", "content": f"add {number}"}]
            answer = {"role": "assistant", "content": str(total)}
            rows.append({"prompt": messages, "completion": [answer]})
            messages = [*messages, answer]
    return rows


tokenizer = AutoTokenizer.from_pretrained(tokenizer_path())
tiny = Qwen3Config(
    vocab_size=len(tokenizer),
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)
own = len(sys.argv) > 2
trainer = SFTTrainer(
    model=sys.argv[1] if own else Qwen3(tiny, rngs=nnx.Rngs(0)),
    args=SFTConfig(
        output_dir="tree_sft",
        packing=True,
        packing_strategy="tree",
        max_length=int(sys.argv[3]) if len(sys.argv) > 3 else 1024,  # distinct tokens of a row
        per_device_train_batch_size=1,
        max_steps=-1 if own else 40,
        learning_rate=1e-5 if own else 3e-3,
        lr_scheduler_type="cosine",
        save_strategy="no",
        logging_steps=1 if own else 10,  # rows of many turns make few steps an epoch
    ),
    train_dataset=sys.argv[2] if own else made_up_turns(),
    processing_class=None if own else tokenizer,
)
trainer.train()
for entry in trainer.state.log_history[:-1]:
    print(f"after step {entry['step']}: loss {entry['loss']:.4f}, tokens per computed one {entry['packing_ratio']:.2f}")
