"""SFTConfig: TRL's names and defaults, refusals by name, checked values."""

import dataclasses
import json
import pickle
from pathlib import Path

import pytest

from jaxtrl.trainers import refused
from jaxtrl.trainers.config import SCHEDULES
from jaxtrl.trainers.options import CONVERTERS, count_steps, hints, member_types
from jaxtrl.trainers.sft_config import SFTConfig

GOLDEN = Path(__file__).parents[1] / "golden" / "trl_options.json"
README = Path(__file__).parents[2] / "README.md"
FIELDS = {field.name: field for field in dataclasses.fields(SFTConfig)}
PROCESSES = {
    "coordinator_address",
    "num_processes",
    "process_id",
    "initialization_timeout",
    "heartbeat_timeout_seconds",
}
# What jaxtrl adds: TRL has the first seven in ScriptArguments and ModelConfig, the others nowhere for SFT.
ADDED = {
    "model_name_or_path",
    "dtype",
    "dataset_name",
    "dataset_config",
    "dataset_train_split",
    "dataset_test_split",
    "dataset_streaming",
    "eval_dataset_name",
    "chat_template_kwargs",
    "compile_cache",
    "compile_effort",
    "warmup",
    "max_programs",
    "batch_window",
    "neuron_instance",
    "neuron_cores",
    "mesh",
    *PROCESSES,
    "donate_buffers",
}


@pytest.fixture(scope="module")
def trl_defaults() -> dict:
    return json.loads(GOLDEN.read_text(encoding="utf-8"))["defaults"]


def test_supported_and_refused_names_cover_trl_exactly(trl_defaults):
    supported, rejected = set(FIELDS) - ADDED, refused.TRAINING.keys() | refused.SFT.keys()
    assert supported & rejected == set()
    assert supported | rejected == set(trl_defaults)
    assert set(FIELDS) >= ADDED
    assert set(FIELDS) & set(SFTConfig.REFUSED) == set()


@pytest.mark.parametrize("name", sorted(set(FIELDS) - ADDED))
def test_defaults_are_trls(name, trl_defaults):
    assert FIELDS[name].default == trl_defaults[name]


@pytest.mark.torch
def test_golden_list_is_trls():
    pytest.importorskip("torch")
    trl = pytest.importorskip("trl")
    from tests.golden.make_trl_golden import option_defaults

    names = {field.name for field in dataclasses.fields(trl.SFTConfig)}
    assert names == (set(FIELDS) - ADDED) | refused.TRAINING.keys() | refused.SFT.keys()
    assert option_defaults() == json.loads(GOLDEN.read_text(encoding="utf-8"))["defaults"]


@pytest.mark.torch
def test_script_options_are_trls():
    pytest.importorskip("torch")
    trl = pytest.importorskip("trl")
    from trl.scripts.utils import DatasetMixtureConfig

    fields = [f for c in (trl.ScriptArguments, trl.ModelConfig, DatasetMixtureConfig) for f in dataclasses.fields(c)]
    own = {"compile_cache", "compile_effort", "warmup", "max_programs", "batch_window"}
    own |= {"neuron_instance", "neuron_cores", "mesh", "donate_buffers", *PROCESSES}
    supported = ADDED - {"eval_dataset_name", "chat_template_kwargs"} - own
    assert {field.name for field in fields} == (refused.SCRIPT.keys() - {"env"}) | supported
    for field in fields:
        if field.name in FIELDS:
            assert FIELDS[field.name].default == field.default, field.name


@pytest.mark.parametrize("name", sorted(SFTConfig.REFUSED))
def test_each_refused_name_gives_its_reason(name):
    with pytest.raises(ValueError, match=name) as caught:
        SFTConfig(**{name: True})
    assert SFTConfig.REFUSED[name] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_refused_names_are_reported_at_once():
    with pytest.raises(ValueError, match=r"fp16 \(.*; push_to_hub \("):
        SFTConfig(fp16=True, learning_rate=1e-4, push_to_hub=True)


def test_unknown_name_gives_the_nearest():
    with pytest.raises(TypeError, match="unknown option 'learning_rat'; did you mean 'learning_rate'"):
        SFTConfig(learning_rat=1e-4)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("learning_rate", "fast", "a number"),
        ("learning_rate", float("nan"), "a number"),
        ("learning_rate", True, "a number"),
        ("max_steps", 1.5, "a whole number"),
        ("max_steps", True, "a whole number"),
        ("packing", 3, "true or false"),
        ("output_dir", 3, "a text or none"),
        ("dataset_name", {}, "a list of names or a text or none"),
        ("chat_template_kwargs", "{broken", "a mapping"),
        ("per_device_train_batch_size", 0, "at least 1"),
        ("learning_rate", -1e-4, "at least 0"),
        ("adam_beta1", 1.0, "less than 1"),
        ("adam_epsilon", 0, "more than 0"),
        ("seed", 2**32, "at most 4294967295"),
        ("data_seed", 10**20, "at most 4294967295"),
        ("max_length", 0, "at least 1"),
        ("loss_type", "chunked_nll", "one of nll, dft"),
        ("lr_scheduler_type", "polynomial", "one of linear, cosine"),
        ("optim", "adafactor", "one of adamw"),
        ("packing_strategy", "bfd-requeue", "one of bfd, bfd_split, wrapped"),
        ("pad_to_multiple_of", "fixed:0", "auto, none, a number, optimal:K or fixed:N"),
        ("pad_to_multiple_of", "sometimes", "auto, none, a number, optimal:K or fixed:N"),
        ("pad_to_multiple_of", 0, "at least 1"),
        ("max_programs", 0, "at least 1"),
        ("batch_window", 0, "at least 1"),
        ("neuron_instance", "trn2.large", "one of trn1.2xlarge"),
        ("compile_effort", "medium", "one of low, high"),
        ("warmup", "later", "one of none, before, background"),
        ("report_to", "mlflow", "tensorboard, wandb, trackio, all or none"),
        ("warmup_steps", 1.5, "a whole number or a share below 1"),
        ("logging_steps", 0, "a whole number of steps or a share"),
        ("save_steps", 2.5, "a whole number of steps or a share"),
    ],
)
def test_a_wrong_value_names_its_option(name, value, expected):
    with pytest.raises(ValueError, match=f"^{name}: .*{expected}"):
        SFTConfig(**{name: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"packing": True, "max_length": None}, "max_length: packing needs"),
        ({"eval_packing": True, "max_length": None}, "max_length: eval_packing needs"),
        ({"dataset_streaming": True}, "max_steps: dataset_streaming needs"),
        ({"packing": True, "batch_window": 4}, "batch_window: packed rows have one size already"),
        ({"load_best_model_at_end": True}, "load_best_model_at_end: .* both"),
        ({"load_best_model_at_end": True, "eval_strategy": "epoch"}, "got epoch and steps"),
        ({"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 300}, "multiple .* got 500 and 300"),
        ({"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 0.1}, "multiple"),
        ({"save_strategy": "best"}, "save_strategy: best needs evaluations"),
        ({"mesh": "fsdp=2,cores=4"}, "mesh: expected sizes from 1 on like data=2,fsdp=4,tensor=1, got 'fsdp=2,cores"),
        ({"mesh": "fsdp=0"}, "mesh: expected sizes from 1 on"),
        ({"neuron_cores": "0-3"}, "neuron_cores: set neuron_instance too"),
        ({"neuron_instance": "trn2.3xlarge", "neuron_cores": "0-1"}, "neuron_cores: .* allowed are 0, 1, 2, 3; 0-3"),
    ],
)
def test_options_that_do_not_fit_together(options, message):
    with pytest.raises(ValueError, match=message):
        SFTConfig(**options)


def test_values_are_converted():
    config = SFTConfig(
        "folder",
        learning_rate="2e-5",
        max_steps="7",
        warmup_steps="0.1",
        packing="true",
        chat_template_kwargs='{"a": 1}',
    )
    assert (config.output_dir, config.learning_rate, config.max_steps, config.packing) == ("folder", 2e-5, 7, True)
    assert (config.warmup_steps, config.chat_template_kwargs) == (0.1, {"a": 1})
    assert SFTConfig(weight_decay=0).weight_decay == 0.0
    assert SFTConfig(pad_to_multiple_of="64").pad_to_multiple_of == 64
    assert SFTConfig(pad_to_multiple_of=None).pad_to_multiple_of == "none"
    assert SFTConfig(pad_to_multiple_of="fixed:2048").pad_to_multiple_of == "fixed:2048"
    assert SFTConfig(pad_to_multiple_of="optimal:6").pad_to_multiple_of == "optimal:6"
    assert [SFTConfig(warmup=w).warmup for w in (True, "true", "background", False)] == [
        "before",
        "before",
        "background",
        "none",
    ]
    assert SFTConfig(max_length="none").max_length is None
    assert SFTConfig(output_dir=Path("a") / "b").output_dir == "a/b"
    assert isinstance(SFTConfig(logging_steps=5.0).logging_steps, int)


@pytest.mark.torch
def test_enumerations_of_transformers_are_accepted():
    pytest.importorskip("torch")
    from transformers.trainer_utils import IntervalStrategy, SchedulerType

    config = SFTConfig(lr_scheduler_type=SchedulerType.COSINE, eval_strategy=IntervalStrategy.EPOCH)
    assert (config.lr_scheduler_type, config.eval_strategy) == ("cosine", "epoch")
    assert type(config.lr_scheduler_type) is str
    assert set(SCHEDULES) <= {kind.value for kind in SchedulerType}


def test_derived_values_are_transformers():
    assert SFTConfig().output_dir == "trainer_output"
    assert SFTConfig(eval_strategy="steps", logging_steps=7).eval_steps == 7
    assert SFTConfig(eval_strategy="epoch").eval_steps is None
    assert SFTConfig().report_to == []
    assert SFTConfig(report_to="wandb").report_to == ["wandb"]
    assert SFTConfig(report_to=["wandb", "tensorboard"]).report_to == ["wandb", "tensorboard"]
    assert SFTConfig(activation_checkpointing=False).gradient_checkpointing is False
    assert SFTConfig(gradient_checkpointing=False).gradient_checkpointing is False
    best = SFTConfig(load_best_model_at_end=True, eval_strategy="epoch", save_strategy="epoch")
    assert (best.metric_for_best_model, best.greater_is_better) == ("loss", False)
    accuracy = SFTConfig(eval_strategy="epoch", save_strategy="best", metric_for_best_model="mean_token_accuracy")
    assert accuracy.greater_is_better is True
    assert SFTConfig(resume_from_checkpoint="true").resume_from_checkpoint is True
    assert SFTConfig(resume_from_checkpoint=False).resume_from_checkpoint is None
    assert SFTConfig(resume_from_checkpoint="out/checkpoint-5").resume_from_checkpoint == "out/checkpoint-5"


def test_report_to_all_means_what_is_installed(monkeypatch):
    installed = {"wandb"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name in installed else None)
    assert SFTConfig(report_to="all").report_to == ["wandb"]


def test_warmup_is_steps_or_a_share():
    assert SFTConfig(warmup_steps=5).get_warmup_steps(100) == 5
    assert SFTConfig(warmup_steps=0.03).get_warmup_steps(101) == 4
    assert count_steps(0, 100) == 0
    assert count_steps(0.25, 10) == 3
    assert count_steps(1, 10) == 1


def test_bf16_unset_follows_the_backend(monkeypatch):
    assert SFTConfig().compute_dtype() == "float32"
    assert SFTConfig(bf16=True).compute_dtype() == "bfloat16"
    monkeypatch.setattr("jax.default_backend", lambda: "neuron")
    assert SFTConfig().compute_dtype() == "bfloat16"
    assert SFTConfig(bf16=False).compute_dtype() == "float32"


def test_a_config_can_be_copied_pickled_and_written_as_json():
    config = SFTConfig("folder", learning_rate=1e-4, chat_template_kwargs={"enable_thinking": False})
    assert dataclasses.replace(config, max_steps=3).max_steps == 3
    assert dataclasses.replace(config, gradient_checkpointing=False).gradient_checkpointing is False
    with pytest.raises(TypeError, match="unknown option 'max_step'"):
        dataclasses.replace(config, max_step=3)
    assert pickle.loads(pickle.dumps(config)) == config
    assert SFTConfig(**json.loads(json.dumps(config.to_dict()))) == config


def test_every_option_documents_itself():
    for field in FIELDS.values():
        assert field.metadata["help"].endswith((".", ")")), field.name
        assert field.metadata["group"], field.name
        assert member_types(hints(SFTConfig)[field.name]) <= CONVERTERS.keys(), field.name


def test_what_is_no_option_is_unknown():
    with pytest.raises(TypeError, match="unknown option 'REFUSED'"):
        SFTConfig(REFUSED={})
    with pytest.raises(TypeError, match="positional"):
        SFTConfig("folder", 3)


def test_the_readme_names_every_option_of_trl(trl_defaults):
    """Each supported one with TRL's default, each refused one with the reason that the error gives."""
    text = README.read_text(encoding="utf-8")
    rows = [
        line for line in text.split("## Coming from TRL")[1].split("\n## ")[0].splitlines() if line.startswith("| `")
    ]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    for name in trl_defaults:
        (row,) = [row for row in cells if f"`{name}`" in row[0].split(", ")]
        if name in FIELDS:
            shown = FIELDS[name].default
            assert len(row) == 3
            shown = "none" if shown is None else str(shown).lower() if isinstance(shown, bool) else str(shown)
            assert row[1] == shown or name in ("bf16", "pad_to_multiple_of")
        else:
            assert row[1] == SFTConfig.REFUSED[name]
    for name in refused.SCRIPT:
        (row,) = [row for row in cells if f"`{name}`" in row[0].split(", ")]
        assert row[1] == refused.SCRIPT[name]
    assert {name for name in ADDED if f"`{name}`" in text} == ADDED


def test_options_of_several_processes(monkeypatch):
    assert SFTConfig().processes() is None
    args = SFTConfig(coordinator_address="host:1234", num_processes=2, process_id=1)
    assert args.processes() == ("host:1234", 2, 1)
    for wrong, message in (
        ({"coordinator_address": "host:1234", "process_id": 0}, "num_processes: set it too"),
        ({"num_processes": 2}, "num_processes: set coordinator_address too"),
        ({"coordinator_address": "auto", "process_id": 0}, "process_id: set coordinator_address too"),
        ({"coordinator_address": "host", "num_processes": 2, "process_id": 1}, "expected host:port"),
        ({"coordinator_address": "host:1", "num_processes": 2, "process_id": 2}, "expected host:port"),
        ({"coordinator_address": "host:12", "num_processes": 2, "process_id": 2}, "process_id 2 of 2 processes"),
        ({"coordinator_address": "auto", "neuron_instance": "trn2.48xlarge"}, "auto comes too late"),
    ):
        with pytest.raises(ValueError, match=message):
            SFTConfig(**wrong)
    monkeypatch.setenv("NEURON_PJRT_PROCESS_INDEX", "0")
    monkeypatch.setenv("NEURON_PJRT_PROCESSES_NUM_DEVICES", "64,64")
    monkeypatch.setenv("NEURON_RT_ROOT_COMM_ID", "host:1233")
    assert SFTConfig(coordinator_address="auto").processes() == ("host:1234", 2, 0)
