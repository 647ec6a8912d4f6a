"""AsyncGRPOConfig: TRL's names and defaults, refusals by name, checked values."""

import dataclasses
import inspect
import json
from pathlib import Path

import pytest

from jaxtrl.trainers import refused
from jaxtrl.trainers.grpo_config import AsyncGRPOConfig
from jaxtrl.trainers.options import CONVERTERS, hints, member_types

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "trl_options.json"
README = ROOT / "README.md"
FIELDS = {field.name: field for field in dataclasses.fields(AsyncGRPOConfig)}
OF_THE_COMMAND = {
    "model_name_or_path",
    "dataset_name",
    "dataset_config",
    "dataset_train_split",
    "dataset_test_split",
    "eval_dataset_name",
    "chat_template_path",
}
OWN = {
    "compile_cache",
    "compile_effort",
    "warmup",
    "neuron_instance",
    "neuron_cores",
    "coordinator_address",
    "num_processes",
    "process_id",
    "initialization_timeout",
    "heartbeat_timeout_seconds",
    "donate_buffers",
    "importance_sampling_mode",
    "importance_sampling_clip_max",
    "importance_sampling_clip_min",
    "recompute_old_logps",
    "drop_zero_std_groups",
    "rollout",
    "rollout_workers",
    "rollout_slots",
    "rollout_cores",
    "ray_address",
    "weights_folder",
}


@pytest.fixture(scope="module")
def trl_defaults() -> dict:
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return {**golden["grpo"], **golden["async_grpo"]}


def added():
    """Options that TRL does not have, those of all trainers included that came after this test."""
    return OF_THE_COMMAND | OWN | ({"mesh", "data", "fsdp", "tensor"} & set(FIELDS))


def test_every_name_of_trl_is_supported_or_refused(trl_defaults):
    supported = set(FIELDS) - added()
    assert supported <= set(trl_defaults)
    assert set(trl_defaults) - supported <= set(AsyncGRPOConfig.REFUSED)
    assert set(FIELDS) & set(AsyncGRPOConfig.REFUSED) == set()
    assert set(FIELDS) >= OF_THE_COMMAND | OWN
    assert refused.GRPO.keys() - trl_defaults.keys() == {"dataset_num_proc", "dataset_streaming"}


def test_defaults_are_trls(trl_defaults):
    different = {n for n in set(FIELDS) - added() if FIELDS[n].default != trl_defaults[n]}
    assert different == {"bf16"} & different  # unset: by the backend
    assert AsyncGRPOConfig().learning_rate == 1e-6


@pytest.mark.torch
def test_golden_list_is_trls():
    pytest.importorskip("torch")
    pytest.importorskip("trl")
    from tests.golden.make_trl_golden import grpo_defaults

    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert grpo_defaults() == {name: golden[name] for name in ("async_grpo", "grpo")}


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:You are importing from 'trl.experimental'")  # by its text: trl may not be installed
def test_every_argument_of_trls_trainers_is_taken_or_refused():
    pytest.importorskip("torch")
    trl = pytest.importorskip("trl")
    from trl.experimental.async_grpo import AsyncGRPOTrainer as Theirs

    from jaxtrl import AsyncGRPOTrainer

    known = {*inspect.signature(AsyncGRPOTrainer).parameters, *refused.GRPO_ARGUMENTS}
    for theirs in (Theirs, trl.GRPOTrainer):
        assert set(inspect.signature(theirs.__init__).parameters) - {"self"} <= known


@pytest.mark.parametrize("name", ["use_vllm", "vllm_mode", "pad_to_multiple_of", "fork_threshold_tokens", "fp16"])
def test_a_refused_name_gives_its_reason(name):
    with pytest.raises(ValueError, match=name) as caught:
        AsyncGRPOConfig(**{name: True})
    assert AsyncGRPOConfig.REFUSED[name] in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollout": "ray", "rollout_cores": "0"}, "Ray places its actors"),
        ({"ray_address": "auto"}, "ray_address: it needs rollout ray, got rollout workers"),
        ({"num_generations": 1}, "num_generations: expected at least 2"),
        ({"loss_type": "sapo"}, "loss_type: expected one of grpo"),
        ({"scale_rewards": "all"}, "scale_rewards: expected one of group, batch, none"),
        ({"reward_weights": "1,x"}, "reward_weights: expected a list of numbers"),
        ({"temperature": 0}, "temperature: expected more than 0"),
        ({"top_p": 0}, "top_p"),
        ({"max_inflight_tasks": 0}, "max_inflight_tasks: expected -1 or"),
        ({"weight_sync_steps": 6}, "max_staleness is 4, .* raise max_staleness to 5"),
        ({"num_iterations": 8}, "max_staleness is 4"),
        ({"rollout_cores": "0-2", "rollout_workers": 2}, "cannot share evenly"),
    ],
)
def test_a_wrong_value_names_its_option(options, message):
    with pytest.raises(ValueError, match=message):
        AsyncGRPOConfig(**options)


def test_values_are_converted():
    assert AsyncGRPOConfig(scale_rewards=True).scale_rewards == "group"
    assert AsyncGRPOConfig(scale_rewards="false").scale_rewards == "none"
    assert AsyncGRPOConfig(reward_weights=["1", 0.5]).reward_weights == [1.0, 0.5]
    params = AsyncGRPOConfig(min_p=0.1, top_k=5, max_completion_length=7).sampling_params()
    assert (params.min_p, params.top_k, params.max_new_tokens) == (0.1, 5, 7)
    assert AsyncGRPOConfig(**json.loads(json.dumps(AsyncGRPOConfig().to_dict()))) == AsyncGRPOConfig()


def test_a_step_has_whole_groups():
    config = AsyncGRPOConfig(per_device_train_batch_size=6, gradient_accumulation_steps=2, num_generations=4)
    assert config.groups_per_step(1) == 3
    with pytest.raises(ValueError, match=r"8 does not divide the 12 completions .*: 2, 3, 4, 6, 12 would"):
        dataclasses.replace(config, num_generations=8).groups_per_step(1)


def test_every_option_documents_itself():
    for field in FIELDS.values():
        assert field.metadata["help"].endswith((".", ")")), field.name
        assert member_types(hints(AsyncGRPOConfig)[field.name]) <= CONVERTERS.keys(), field.name


def test_the_readme_names_every_option_of_trl(trl_defaults):
    """Each supported one with its default, each refused one with the reason that the error gives, where SFT has not."""
    section = README.read_text(encoding="utf-8").split("### Coming from TRL's AsyncGRPO")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    from jaxtrl.trainers.sft_config import SFTConfig

    told = {field.name for field in dataclasses.fields(SFTConfig)} | set(SFTConfig.REFUSED)
    changed = {"learning_rate", "logging_steps", "lr_scheduler_type", "shuffle_dataset"} | set(refused.GRPO)
    for name in (set(trl_defaults) - told) | (changed & set(trl_defaults)) | OWN - told:
        found = [row for row in cells if f"`{name}`" in row[0].split(", ")]
        assert len(found) == 1, name
        if name in FIELDS:
            default = FIELDS[name].default
            shown = "none" if default is None else str(default).lower() if isinstance(default, bool) else str(default)
            assert found[0][1] == shown, name
        else:
            assert found[0][1] == AsyncGRPOConfig.REFUSED[name], name


@pytest.mark.parametrize("name", ["grpo_tiny", "grpo_qwen3_0.6b", "grpo_trn2"])
def test_the_shipped_configurations_load(name):
    from jaxtrl.grpo import RewardOptions
    from jaxtrl.trainers.arguments import parse

    args, rewards = parse([AsyncGRPOConfig, RewardOptions], [f"--config={ROOT / 'configs' / name}.yaml"])
    assert args.groups_per_step(1) >= 1
    assert rewards.reward_funcs
