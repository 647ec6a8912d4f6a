"""Writes the golden numbers of TRL and Transformers that stand beside this file.

Needs torch, trl==1.16.0 and ../shared:

    python -m tests.golden.make_trl_golden [--shared ../shared]

- `trl_sft.json`: SFTTrainer, 10 steps on one repeated batch of 4 rows cut from chat_multiturn, ids renumbered densely
  so that a tiny vocabulary holds them; rows, options and curves, all that is needed to check without ../shared.
- `trl_sft_qwen3_ids.json`: the same rows, longer and with their real ids, on a model with Qwen3's vocabulary; no rows.
- `transformers.json`: logits, loss and gradients of fixture T, of an untied head and of attention biases.
- `trl_options.json`: names and defaults of the fields of trl.SFTConfig, AsyncGRPOConfig and GRPOConfig.
"""

import argparse
import dataclasses
import enum
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.fixture_t import R1, R2, values
from tests.golden.formula_qwen3 import make_config, tensors

HERE = Path(__file__).parent
STEPS = 10
COMMON = {"learning_rate": 1e-3, "lr_scheduler_type": "constant", "per_device_train_batch_size": 4, "max_steps": STEPS}
RECIPE = {
    "lr_scheduler_type": "cosine",
    "warmup_steps": 3,
    "weight_decay": 0.1,
    "adam_beta1": 0.8,
    "adam_beta2": 0.95,
    "max_grad_norm": 0.5,
}
# Name -> (options, whether the first third of each row is masked out as a prompt).
RUNS: dict[str, tuple[dict[str, Any], bool]] = {
    "nll": ({}, False),
    "dft": ({"loss_type": "dft"}, True),
    "recipe": (RECIPE, True),
    "accumulated": ({"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}, True),
}
LENGTHS = (64, 41, 53, 30)


def chat_rows(shared: Path, count: int = 4) -> list[list[int]]:
    """Token ids of the first rows of chat_multiturn under the stock chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(shared / "data" / "qwen3-tokenizer")
    with (shared / "data" / "jsonl" / "chat_multiturn.jsonl").open(encoding="utf-8") as lines:
        messages = [json.loads(next(lines))["messages"] for _ in range(count)]
    return [list(tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False)) for turns in messages]


def renumber(rows: list[list[int]]) -> list[list[int]]:
    """Ids 2, 3, ... in order of first use (0 is the padding, 1 the EOS of the configuration)."""
    number: dict[int, int] = {}
    return [[number.setdefault(token, len(number) + 2) for token in row] for row in rows]


def masked(row: list[int], prompt: bool) -> list[int]:
    """Labels: the ids, -100 on the first third where it is a prompt."""
    start = len(row) // 3 if prompt else 0
    return [-100] * start + row[start:]


def build(config: dict[str, Any]) -> Any:
    """Transformers' Qwen3 with the formula's weights, float32, in evaluation mode."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    fields = {key: value for key, value in config.items() if key not in ("architectures", "model_type", "rope_theta")}
    rope = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    model = Qwen3ForCausalLM(Qwen3Config(rope_parameters=rope, **fields))
    weights = {name: torch.tensor(value) for name, value in tensors(config).items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= ({"lm_head.weight"} if config["tie_word_embeddings"] else set()), missing
    model.tie_weights()
    return model.float().eval()


def run_trl(config: dict[str, Any], rows: list[list[int]], options: dict[str, Any], prompt: bool) -> dict[str, Any]:
    """Curves of trl.SFTTrainer on one repeated batch of `rows`, and its evaluation on the same rows afterwards."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    data = Dataset.from_dict({"input_ids": rows, "labels": [masked(row, prompt) for row in rows]})
    with tempfile.TemporaryDirectory() as folder:
        args = SFTConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            activation_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
            max_length=1024,
            per_device_eval_batch_size=4,
            **(COMMON | options),
        )
        trainer = SFTTrainer(
            build(config), args, train_dataset=data, eval_dataset=data, processing_class=placeholder_tokenizer()
        )
        trainer.train()
        steps = [log for log in trainer.state.log_history if "loss" in log]
        evaluation = trainer.evaluate()
    names = ("loss", "grad_norm", "learning_rate", "entropy", "mean_token_accuracy", "num_tokens")
    out = {name: [float(log[name]) for log in steps] for name in names}
    out |= {name: float(evaluation[name]) for name in ("eval_loss", "eval_entropy", "eval_mean_token_accuracy")}
    assert len(steps) == STEPS, len(steps)
    return out


def placeholder_tokenizer() -> Any:
    """A tokenizer that is never used on text: the rows are ids already."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def transformers_numbers(config: dict[str, Any], row: list[int]) -> dict[str, Any]:
    """Logits, mean NLL, and each parameter gradient's norm and projection on the formula's weights number 300 + j."""
    import torch

    model = build(config)
    ids = torch.tensor([row])
    output = model(input_ids=ids, labels=ids)
    output.loss.backward()
    gradients = {}
    for j, (name, parameter) in enumerate(sorted(model.named_parameters())):
        gradient = parameter.grad.double().numpy()
        gradients[name] = [float(np.linalg.norm(gradient)), float((gradient * values(300 + j, gradient.shape)).sum())]
    logits = output.logits[0].detach().double().numpy()
    return {"ids": row, "loss": output.loss.item(), "logits": np.round(logits, 6).tolist(), "gradients": gradients}


def option_defaults(config: type | None = None) -> dict[str, Any]:
    """Field -> JSON-ready default of a configuration of TRL (none: SFTConfig)."""
    from trl import SFTConfig

    def default(field: dataclasses.Field) -> Any:
        value = field.default if field.default is not dataclasses.MISSING else field.default_factory()
        return value.value if isinstance(value, enum.Enum) else value

    return {field.name: default(field) for field in dataclasses.fields(config or SFTConfig)}


def grpo_defaults() -> dict[str, dict[str, Any]]:
    """Those of GRPO: the asynchronous trainer's, and the synchronous one's where it lacks them."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl import GRPOConfig
    from trl.experimental.async_grpo import AsyncGRPOConfig

    first, second = option_defaults(AsyncGRPOConfig), option_defaults(GRPOConfig)
    return {"async_grpo": first, "grpo": {name: value for name, value in second.items() if name not in first}}


def write(name: str, content: dict[str, Any]) -> None:
    """JSON with one line per entry of the two outer levels."""
    lines = []
    for key, value in content.items():
        if isinstance(value, dict) and value:
            inner = ",\n".join(f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
            lines.append(f"  {json.dumps(key)}: {{\n{inner}\n  }}")
        else:
            lines.append(f"  {json.dumps(key)}: {json.dumps(value)}")
    (HERE / name).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def main() -> None:
    """Writes the four files."""
    import torch
    import transformers
    import trl

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=Path("../shared"), help="folder with data/")
    shared = parser.parse_args().shared
    made_with = {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__}

    rows = chat_rows(shared)
    small = renumber([row[:length] for row, length in zip(rows, LENGTHS, strict=True)])
    vocab = -(-(max(map(max, small)) + 1) // 16) * 16
    config = make_config(vocab_size=vocab)
    curves = {name: run_trl(config, small, options, prompt) for name, (options, prompt) in RUNS.items()}
    write("trl_sft.json", {"made_with": made_with, "vocab_size": vocab, "rows": small, **curves})

    real = [row[:256] for row in rows]
    config = make_config(vocab_size=151936, eos_token_id=151645, pad_token_id=151643)
    write("trl_sft_qwen3_ids.json", {"made_with": made_with, "nll": run_trl(config, real, *RUNS["nll"])})

    variants = {"tied": {}, "untied": {"tie_word_embeddings": False}, "bias": {"attention_bias": True}}
    numbers = {
        f"{name} {row_name}": transformers_numbers(make_config(**changes), row)
        for name, changes in variants.items()
        for row_name, row in (("r1", R1), ("r2", R2))
    }
    write("transformers.json", {"made_with": made_with, **numbers})
    write("trl_options.json", {"made_with": made_with, "defaults": option_defaults(), **grpo_defaults()})


if __name__ == "__main__":
    main()
