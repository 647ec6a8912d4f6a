"""config.json in and out: both spellings of theta, defaults as in Transformers, unsupported fields refused by name."""

import json

import pytest

from jaxtrl.model.config import Qwen3Config
from tests import fixture_t

REAL_06B = {  # config.json of Qwen/Qwen3-0.6B
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def without(*names: str) -> dict:
    return {name: value for name, value in fixture_t.CONFIG.items() if name not in names}


def test_the_published_config_is_read():
    config = Qwen3Config.from_dict(REAL_06B)
    assert (config.hidden_size, config.num_hidden_layers, config.head_dim) == (1024, 28, 128)
    assert (config.num_attention_heads, config.num_key_value_heads) == (16, 8)
    assert config.rope_theta == 1e6
    assert config.tie_word_embeddings
    assert (config.eos_token_id, config.bos_token_id, config.pad_token_id) == (151645, 151643, None)


def test_c18_head_dim_is_128_where_it_is_missing_and_never_hidden_over_heads():
    assert Qwen3Config.from_dict(without("head_dim")).head_dim == 128
    assert Qwen3Config.from_dict(fixture_t.CONFIG).head_dim == 16


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 1e6},
        {"rope_theta": 1000000},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_parameters": {"rope_theta": 1e6}},
        {"rope_theta": 1e6, "rope_parameters": {"rope_type": "default"}},
        {"rope_theta": 1e6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_theta": 1e6, "rope_scaling": {"type": "default"}},
        {"rope_scaling": {"rope_type": "default", "rope_theta": 1e6}},
    ],
)
def test_c20_every_spelling_of_theta_is_read(spelling):
    assert Qwen3Config.from_dict({**without("rope_theta"), **spelling}).rope_theta == 1e6


@pytest.mark.parametrize(
    "kind", ["linear", "dynamic", "yarn", "longrope", "llama3", "proportional", "mrope", "unheard_of"]
)
@pytest.mark.parametrize("field", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_c20_rope_scaling_is_refused_by_name(kind, field, key):
    scaling = {key: kind, "factor": 4.0, "rope_theta": 1e6}
    with pytest.raises(ValueError, match=f"{field}.{key} '{kind}' is not supported"):
        Qwen3Config.from_dict({**without("rope_theta"), field: scaling})


def test_c20_no_theta_is_an_error_not_ten_thousand():
    with pytest.raises(ValueError, match="rope_theta is missing"):
        Qwen3Config.from_dict(without("rope_theta"))
    with pytest.raises(ValueError, match=r"rope_theta 1000000.0 and rope_parameters.rope_theta 5000000.0 contradict"):
        Qwen3Config.from_dict({**fixture_t.CONFIG, "rope_parameters": {"rope_type": "default", "rope_theta": 5e6}})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen2"}, "model_type 'qwen2' is not supported"),
        ({"model_type": "qwen3_moe"}, "model_type 'qwen3_moe' is not supported"),
        ({"model_type": None}, "model_type None is not supported"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "architectures .*SequenceClassification"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is not supported"),
        ({"compression_config": {"format": "int4"}}, "compression_config is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"attention_dropout": 0.1}, "attention_dropout 0.1 is not supported"),
        ({"use_sliding_window": True, "max_window_layers": 1}, "use_sliding_window is not supported"),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types with 'sliding_attention'"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for num_hidden_layers 2"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor 0.5"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "rope_parameters.full_attention is not supp"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object"),
        ({"rope_theta": "1e6"}, "rope_theta must be a number"),
        ({"num_attention_heads": 3}, r"num_attention_heads \(3\) must be a multiple"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer"),
        ({"hidden_size": "32"}, "hidden_size must be a positive integer, but it is '32'"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps must be a positive number"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id or null, but it is '</s>'"),
        ({"pad_token_id": [1]}, r"pad_token_id must be a token id or null, but it is \[1\]"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false"),
    ],
)
def test_what_changes_the_result_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        Qwen3Config.from_dict({**fixture_t.CONFIG, **change})


@pytest.mark.parametrize(
    "change",
    [
        {"use_sliding_window": True, "max_window_layers": 2},  # all layers are below max_window_layers
        {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
        {"layer_types": ["full_attention", "full_attention"], "use_sliding_window": True, "max_window_layers": 0},
        {"attention_dropout": 0, "quantization_config": None, "architectures": None},
        {"torch_dtype": "bfloat16", "use_cache": False, "transformers_version": "4.51.0", "note": "mine"},
        {"partial_rotary_factor": 1.0},
    ],
)
def test_what_does_not_change_the_result_is_ignored(change):
    assert Qwen3Config.from_dict({**fixture_t.CONFIG, **change}) == Qwen3Config.from_dict(fixture_t.CONFIG)


def test_missing_key_value_heads_are_as_many_as_heads():
    assert Qwen3Config.from_dict({**fixture_t.CONFIG, "num_key_value_heads": None}).num_key_value_heads == 4


def test_the_config_goes_out_and_in_unchanged(tmp_path):
    config = Qwen3Config.from_dict({**REAL_06B, "eos_token_id": [151645, 151643]})
    assert hash(config) == hash(Qwen3Config.from_dict({**REAL_06B, "eos_token_id": [151645, 151643]}))
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    assert Qwen3Config.from_pretrained(tmp_path) == config
    assert config.to_dict()["eos_token_id"] == [151645, 151643]


def test_errors_name_the_file(tmp_path):
    path = tmp_path / "config.json"
    with pytest.raises(FileNotFoundError, match=f"{path} does not exist"):
        Qwen3Config.from_pretrained(tmp_path)
    path.write_text('{"model_type": ')
    with pytest.raises(ValueError, match=f"{path} is not valid JSON"):
        Qwen3Config.from_pretrained(tmp_path)
    path.write_text("[1]")
    with pytest.raises(ValueError, match=f"{path} must hold a JSON object, but it holds a list"):
        Qwen3Config.from_pretrained(tmp_path)
    path.write_text(json.dumps({**fixture_t.CONFIG, "hidden_act": "relu"}))
    with pytest.raises(ValueError, match=f"{path}: hidden_act 'relu'"):
        Qwen3Config.from_pretrained(tmp_path)


@pytest.mark.torch
def test_transformers_reads_what_is_written_as_the_same_model():
    pytest.importorskip("torch")
    from transformers import Qwen3Config as Theirs

    config = Qwen3Config.from_dict(fixture_t.CONFIG)
    theirs = Theirs.from_dict(config.to_dict())
    assert theirs.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}
    assert theirs.layer_types == ["full_attention"] * 2
    assert Qwen3Config.from_dict(theirs.to_dict()) == config
    defaults = Theirs()
    ours = Qwen3Config()
    for name in config.to_dict().keys() - {"architectures", "rope_parameters", "rope_theta", "sliding_window"}:
        assert getattr(ours, name, None) == getattr(defaults, name) or not hasattr(ours, name), name
