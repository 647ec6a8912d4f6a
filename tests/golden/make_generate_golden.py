"""Writes `generate.json`: greedy tokens of Transformers' `generate`, prompt by prompt. Needs torch.

    python -m tests.golden.make_generate_golden

The models are fixture T and a larger one from the same formula (`formula_qwen3`); `margin` is the least distance of the
two largest logits on the way.
"""

import json
from pathlib import Path
from typing import Any

from tests.golden.formula_qwen3 import make_config, tensors

PROMPTS = [[5, 9, 12], [7], [7, 7, 20, 31, 2, 14, 3, 8], list(range(2, 42)), [33, 61]]
RANDOM = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {"fixture T": {}, "random": RANDOM}
NEW = 64


def hf_model(fields: dict[str, Any]):
    """Transformers' model of the formula, float32."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = Qwen3ForCausalLM(Qwen3Config(**fields)).eval()
    state = {name: torch.tensor(value) for name, value in tensors(fields).items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert missing in ([], ["lm_head.weight"])
    model.generation_config.eos_token_id = None
    return model


def greedy(model, prompt: list[int]) -> tuple[list[int], float]:
    """The tokens, and the least margin between first and second."""
    import torch

    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    best = torch.stack([logits[0] for logits in out.logits]).topk(2).values
    return out.sequences[0, len(prompt) :].tolist(), float((best[:, 0] - best[:, 1]).min())


def main() -> None:
    found = {}
    for name, changes in MODELS.items():
        model = hf_model(make_config(**changes))
        runs = [greedy(model, prompt) for prompt in PROMPTS]
        found[name] = [{"prompt": p, "tokens": t, "margin": m} for p, (t, m) in zip(PROMPTS, runs, strict=True)]
        print(name, [run[1] for run in runs])
    text = json.dumps(found)
    (Path(__file__).parent / "generate.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
