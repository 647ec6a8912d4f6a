"""GRPO's losses against the code of TRL 1.16 that computes them, called without its trainers and models around."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtrl.model.config import Qwen3Config
from jaxtrl.model.hf import params_from_hf, params_to_hf
from jaxtrl.rows.advantages import LOSS_TYPES, group_advantages, normalise_row
from jaxtrl.rows.batch import Sample, ShapeClass, concat_rows, make_batch
from jaxtrl.rows.tree import tree_row
from jaxtrl.train.grpo import make_grpo_step
from jaxtrl.train.mesh import make_mesh, replicated
from jaxtrl.train.policy import PolicyLoss
from jaxtrl.train.state import TrainState
from tests.fixture_t import CONFIG
from tests.golden.formula_qwen3 import make_config, tensors

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]  # what TRL and torch warn about is theirs

LONGEST = 6


def completions(seed: int = 0) -> list[Sample]:
    """Two prompts of three tokens with four and three completions, some of which begin or are the same."""
    draw, out = np.random.default_rng(seed), []
    groups = [([5, 9, 12], [[3, 7, 1], [3, 20, 11, 4], [3, 7, 1], [8, 2, 6]]), ([5, 40, 7], [[3, 7, 30], [9], [3, 7]])]
    for group, (prompt, members) in enumerate(groups):
        advantages = group_advantages(draw.normal(size=len(members)))
        for completion, advantage in zip(members, advantages.tolist(), strict=True):
            ids = np.array([*prompt, *completion], np.int32)
            columns = [(draw.normal(-4.5, 0.6, len(ids))).astype(np.float32) for _ in range(3)]
            out.append(Sample(ids, np.arange(len(ids)) >= 3, advantage, *columns, group=group))
    return out


class Processes:
    """What TRL's losses ask of accelerate, for one process."""

    num_processes = 1
    sync_gradients = True

    def reduce(self, x, reduction="sum"):
        return x

    gather = gather_for_metrics = reduce


# AsyncGRPOTrainer: the default loss, through the model


def trl_async_loss(samples: list[Sample]) -> tuple[float, dict[str, np.ndarray], dict[str, float]]:
    """Loss, gradients and metrics of one micro-batch with all samples."""
    import torch
    from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer

    from tests.golden.make_trl_golden import build

    network = build(make_config())

    def model(input_ids, **_):
        parts, start = [], 0
        for s in samples:
            ids = input_ids[:, start : start + len(s.input_ids)]
            start += len(s.input_ids)
            log_p = torch.log_softmax(network(input_ids=ids).logits[0], -1)
            logp = log_p[:-1].gather(1, ids[0, 1:, None])[:, 0]
            entropy = -(log_p.exp() * log_p).sum(-1)
            parts.append((torch.cat([logp, logp.new_zeros(1)]), entropy))
        logp, entropy = (torch.cat(x)[None] for x in zip(*parts, strict=True))
        return SimpleNamespace(log_probs=logp, entropy=entropy)

    starts = np.cumsum([0, *(len(s.input_ids) for s in samples)])
    trained = [np.flatnonzero(s.loss_mask) for s in samples]
    index = np.concatenate([start + t - 1 for start, t in zip(starts, trained, strict=False)])
    row = concat_rows(samples)
    flat = {
        "attention_mask": np.ones(starts[-1], np.int64),
        "token_index": index,
        "input_ids": row.input_ids.astype(np.int64),
        "position_ids": row.position_ids.astype(np.int64),
        "shift_labels": row.input_ids.astype(np.int64),
        "old_log_probs": row.old_logp,
        "advantages": row.advantage,
        "segment_id": row.term_sample.astype(np.int64),
        **dict.fromkeys(("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k"), np.zeros(1, np.int64)),
        "tree_max_seqlens": np.ones(2, np.int64),
    }
    inputs = {name: torch.tensor(value)[None] for name, value in flat.items()}
    counts = {"global_n_tokens": len(index), "global_n_forward_tokens": starts[-1], "mean_seq_len": 5.0}
    inputs |= {name: torch.tensor([value]) for name, value in counts.items()}
    counters = ("forward_tokens", "trained_tokens", "seq_len_weighted", "samples", "forward_s")
    trainer = SimpleNamespace(
        epsilon_low=0.2,
        epsilon_high=0.2,
        accelerator=Processes(),
        current_gradient_accumulation_steps=1,
        aux_loss_enabled=False,
        _metrics={"train": defaultdict(list)},
        **{f"_step_{name}": 0.0 for name in counters},
    )
    loss = AsyncGRPOTrainer.compute_loss(trainer, model, inputs)
    loss.backward()
    gradients = {name: parameter.grad.numpy() for name, parameter in network.named_parameters()}
    return loss.item(), gradients, {name: values[0] for name, values in trainer._metrics["train"].items()}


@pytest.mark.slow
def test_default_loss_is_that_of_async_grpo():
    """On a tree row, accumulated over two and on two devices; TRL itself is only asked about one micro-batch."""
    pytest.importorskip("torch")
    pytest.importorskip("trl")
    samples = completions()
    loss, gradients, trl_metrics = trl_async_loss(samples)
    config = Qwen3Config.from_dict(CONFIG)
    params = jax.tree.map(jnp.asarray, params_from_hf(config, tensors(make_config())))
    shape = ShapeClass(40, 32, 32, 10)

    def batch(*parts):
        return make_batch([normalise_row(tree_row(part), "dapo") for part in parts], shape, 8)

    sgd = optax.sgd(1.0)
    two_devices = make_mesh(2)
    one, two = (make_grpo_step(config, sgd, mesh, donate=False) for mesh in (None, two_devices))
    spread = [batch(samples[:3]), batch(samples[3:])]
    state = TrainState.create(params, sgd)
    for step, batches in ((one, [batch(samples)]), (one, spread), (two, [batch(samples[:5], samples[5:])])):
        placed = jax.device_put(state, replicated(two_devices)) if step is two else state
        after, metrics = step(placed, *batches)
        assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-5)
        change = jax.tree.map(lambda old, new: np.asarray(old) - np.asarray(new), params, after.params)
        ours = dict(params_to_hf(config, change))
        for name, want in gradients.items():
            scale = np.abs(tensors(make_config())[name]).max()  # the change is a difference of rounded parameters
            assert np.abs(ours[name] - want).max() <= 1e-5 * np.abs(want).max() + 2**-23 * scale, name
        for name in ("ratio", "kl", "entropy", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"):
            assert float(metrics[name]) == pytest.approx(trl_metrics[name], rel=1e-5, abs=1e-6), name


# GRPOTrainer: every option, on given log-probs


def trl_loss(logps: np.ndarray, samples: list[Sample], options: dict[str, Any]) -> tuple[float, np.ndarray, dict]:
    """Loss, its gradient by the log-probs [samples, LONGEST], metrics."""
    import torch
    from trl import GRPOTrainer

    def column(name: str) -> Any:
        out = torch.zeros(len(samples), LONGEST)
        for line, s in zip(out, samples, strict=True):
            values = torch.tensor(getattr(s, name)[s.loss_mask])
            line[: len(values)] = values
        return out

    lengths = torch.tensor([int(s.loss_mask.sum()) for s in samples])
    mask = (torch.arange(LONGEST) < lengths[:, None]).int()
    leaf = torch.tensor(logps, dtype=torch.float32, requires_grad=True)
    ids = torch.ones(len(samples), LONGEST, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :3],
        "prompt_mask": ids[:, :3],
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": torch.tensor([s.advantage for s in samples]),
        "old_per_token_logps": column("old_logp"),
        "ref_per_token_logps": column("ref_logp"),
        "num_items_in_batch": mask.sum(),
    }
    mode = options.get("importance_sampling_mode")
    if mode is not None:  # computed where TRL generates, as its documentation says
        difference = (column("old_logp") - column("sampler_logp")) * mask
        ratio = torch.exp(difference.sum(-1, keepdim=True) if mode.startswith("sequence") else difference)
        cap = options["importance_sampling_clip_max"]
        ratio = ratio.clamp(max=cap) if mode.endswith("truncate") else ratio.masked_fill(ratio > cap, 0.0)
        inputs["importance_sampling_ratio"] = ratio
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (leaf, torch.ones_like(leaf), None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=options.get("importance_sampling_level", "token"),
        beta=options.get("beta", 0.0),
        loss_type=options.get("loss_type", "dapo"),
        epsilon_low=0.2,
        epsilon_high=options.get("epsilon_high", 0.2),
        use_vllm=mode is not None,
        vllm_importance_sampling_correction=mode is not None,
        max_completion_length=LONGEST,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        accelerator=Processes(),
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
        args=SimpleNamespace(
            use_bias_correction_kl=options.get("use_bias_correction_kl", True),
            delta=options.get("delta"),
            steps_per_generation=1,
        ),
    )
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    metrics = {name: values[0] for name, values in trainer._metrics["train"].items()}
    return loss.item(), leaf.grad.numpy()[mask.numpy() > 0], metrics


BOUNDED = {
    "kl": {"beta": 0.2},
    "plain kl": {"beta": 0.2, "use_bias_correction_kl": False},
    "dual clip": {"delta": 1.5},
    "token": {"importance_sampling_mode": "token_truncate", "importance_sampling_clip_max": 1.3},
    "sequence": {"importance_sampling_mode": "sequence_mask", "importance_sampling_clip_max": 1.3, "beta": 0.1},
}
CASES = [({"loss_type": t} | ({"epsilon_high": 1.1} if t == "cispo" else {}), t) for t in LOSS_TYPES]
CASES += [(options, name) for name, options in BOUNDED.items()]


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("options", "name"), CASES, ids=[name for _, name in CASES])
def test_options_are_those_of_grpo(options, name, level):
    pytest.importorskip("torch")
    pytest.importorskip("trl")
    options = options | {"importance_sampling_level": level}
    samples, draw = completions(1), np.random.default_rng(2)
    logps = np.stack([np.pad(s.old_logp[s.loss_mask], (0, LONGEST - s.loss_mask.sum())) for s in samples])
    logps = logps + draw.normal(0, 0.4, logps.shape).astype(np.float32)
    loss, slope, metrics = trl_loss(logps, samples, options)
    row = normalise_row(concat_rows(samples), options.get("loss_type", "dapo"), LONGEST)
    row = jax.tree.map(lambda x: jnp.asarray(x), row)
    policy = PolicyLoss(**options)

    def total(logp):
        terms = policy.evaluate(logp, row)
        return (row.weight * terms.loss).sum() / row.denominator, terms

    own = np.concatenate([line[: s.loss_mask.sum()] for line, s in zip(logps, samples, strict=True)])
    (ours, terms), gradient = jax.value_and_grad(total, has_aux=True)(jnp.asarray(own, jnp.float32))
    assert float(ours) == pytest.approx(loss, rel=1e-5)
    np.testing.assert_allclose(gradient, slope, rtol=2e-5, atol=1e-7)
    mean = lambda x: float((terms.ratio_share * x).sum() / terms.ratio_share.sum())  # noqa: E731
    if options.get("loss_type") == "cispo":
        assert metrics["cispo_clip_ratio"] == pytest.approx(mean(terms.high), rel=1e-5)
    else:
        assert metrics["clip_ratio/low_mean"] == pytest.approx(mean(terms.low), rel=1e-5)
        assert metrics["clip_ratio/high_mean"] == pytest.approx(mean(terms.high), rel=1e-5)
        assert metrics["clip_ratio/region_mean"] == pytest.approx(mean(terms.low + terms.high), rel=1e-5)
    if policy.beta:
        kl = terms.kl * terms.ratio if policy.use_bias_correction_kl else terms.kl
        assert metrics["kl"] == pytest.approx(float(kl.mean()), rel=1e-5)
