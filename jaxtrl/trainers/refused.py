"""Options and arguments of TRL 1.16 and Transformers 5 that jaxtrl refuses by name, with the reason a user reads."""

_TORCH = "a setting of PyTorch"
_HUB = "nothing is uploaded: use `hf upload` on output_dir after the run"
_LOADER = "rows are built with numpy in a thread ahead of the device, there is no data-loader process"
_DEVICES = "devices are laid out by jaxtrl's mesh"
_EVALUATION = "evaluation sums over tokens; compute_metrics gets log-prob, entropy and hit of each trained token"
_SCRIPT = "the command trains, and eval_strategy says when to evaluate"
_LORA = "all weights are trained, there are no adapters"
_QUANTISED = "quantised weights are not supported"
_MIXTURE = "give files or globs to dataset_name, or mix with the datasets library and pass train_dataset"

# Fields of transformers.TrainingArguments.
TRAINING = {
    "optim_args": "the optimizer is AdamW: pass another as SFTTrainer(optimizers=(optax transformation, None))",
    "optim_target_modules": "GaLore and APOLLO are not built in: pass optimizers=(optax transformation, None)",
    "average_tokens_across_devices": "always on: one normaliser over all devices and micro-batches",
    "label_smoothing_factor": "not implemented for the chunked LM head",
    "fp16": "float16 needs loss scaling: use bf16",
    "bf16_full_eval": "evaluation computes in the dtype of training: use bf16",
    "fp16_full_eval": "evaluation computes in the dtype of training: use bf16",
    "tf32": "set JAX_DEFAULT_MATMUL_PRECISION in the environment",
    "activation_checkpointing_kwargs": "one recomputation policy per value of gradient_checkpointing",
    "gradient_checkpointing_kwargs": "one recomputation policy per value of gradient_checkpointing",
    "torch_compile": "every step is compiled: compile_effort chooses less waiting (low) or faster steps (high)",
    "torch_compile_backend": "XLA or neuronx-cc compiles every step",
    "torch_compile_mode": "XLA or neuronx-cc compiles every step: compile_effort chooses the effort",
    "use_liger_kernel": "CUDA kernels; the LM head and loss are chunked and fused already",
    "liger_kernel_config": "CUDA kernels; the LM head and loss are chunked and fused already",
    "use_cache": "training keeps no K/V cache",
    "neftune_noise_alpha": "training steps use no randomness",
    "torch_empty_cache_steps": _TORCH,
    "auto_find_batch_size": "row sizes are fixed before the first step: lower per_device_train_batch_size",
    "log_on_each_node": "only the first process logs",
    "logging_nan_inf_filter": "a non-finite step is skipped and counted, never hidden",
    "include_num_input_tokens_seen": "always on: num_tokens is logged",
    "log_level": "output has one level; disable_tqdm turns the progress bar off",
    "log_level_replica": "only the first process logs",
    "trackio_space_id": _HUB,
    "trackio_bucket_id": _HUB,
    "trackio_static_space_id": _HUB,
    "eval_delay": "evaluation starts after the first eval_steps or epoch",
    "prediction_loss_only": "logits are never kept, not even for compute_metrics",
    "eval_do_concat_batches": _EVALUATION,
    "eval_use_gather_object": _EVALUATION,
    "eval_accumulation_steps": _EVALUATION,
    "include_for_metrics": _EVALUATION,
    "batch_eval_metrics": _EVALUATION,
    "save_only_model": "every checkpoint can be resumed; the final model is saved in Hugging Face format",
    "save_on_each_node": "output_dir is shared by all processes",
    "enable_jit_checkpoint": "checkpoints follow save_strategy; a killed run resumes from the newest one",
    "push_to_hub": _HUB,
    "hub_token": _HUB,
    "hub_private_repo": _HUB,
    "hub_model_id": _HUB,
    "hub_strategy": _HUB,
    "hub_always_push": _HUB,
    "hub_revision": _HUB,
    "ignore_data_skip": "a resumed run continues at the exact data position at no cost",
    "restore_callback_states_from_checkpoint": "always on: a callback with a state gets it back",
    "full_determinism": "always on: runs are reproducible bit for bit on the same devices",
    "use_cpu": "set JAX_PLATFORMS=cpu in the environment",
    "accelerator_config": _DEVICES,
    "parallelism_config": _DEVICES,
    "dataloader_drop_last": "a short last step is trained with its own normaliser, no row is left out",
    "dataloader_num_workers": _LOADER,
    "dataloader_pin_memory": _LOADER,
    "dataloader_persistent_workers": _LOADER,
    "dataloader_prefetch_factor": _LOADER,
    "dataloader_multiprocessing_context": _LOADER,
    "dataloader_in_order": _LOADER,
    "remove_unused_columns": "only the columns of the data format are read",
    "label_names": "labels come from the data format, or from a column labels beside input_ids",
    "length_column_name": "lengths are counted while tokenizing",
    "ddp_find_unused_parameters": _TORCH,
    "ddp_bucket_cap_mb": _TORCH,
    "ddp_broadcast_buffers": _TORCH,
    "ddp_static_graph": _TORCH,
    "ddp_backend": _TORCH,
    "ddp_timeout": _TORCH,
    "fsdp": _DEVICES,
    "fsdp_config": _DEVICES,
    "deepspeed": _DEVICES,
    "debug": "non-finite steps are counted in the metrics; JAX_DEBUG_NANS=1 stops at the first",
    "skip_memory_metrics": "memory is reported per compiled program",
    "do_train": _SCRIPT,
    "do_eval": _SCRIPT,
    "do_predict": _SCRIPT,
    "local_rank": "processes are numbered by jax.distributed",
}

# Fields that trl.SFTConfig adds.
SFT = {
    "model_init_kwargs": "the model is read from its config.json: use dtype, or pass a Qwen3 as model",
    "router_aux_loss_coef": "only dense Qwen3 models are supported",
    "dataset_kwargs": "a data set with input_ids is taken as prepared",
    "padding_free": "always on: the sequences of a batch are one row of tokens per device",
    "activation_offloading": "activations are recomputed: use gradient_checkpointing",
    "pad_token": "padding is never seen by attention or loss, so its id does not matter",
}

_VLLM = "completions are sampled by jaxtrl's own rollout workers"
_CORRECTION = "it is called importance_sampling_{}: the sampler is jaxtrl's own"
_TOOLS = "prompts are answered in one turn, without tools"
_OTHER_LOSS = "belongs to a loss_type that there is not: use grpo, dr_grpo, dapo, bnpo or cispo"
_ENTROPY = "there is no entropy term"
_CHUNKS = "groups come in the order of the data and are trained num_iterations times"

# Fields that trl.GRPOConfig and trl.experimental.async_grpo.AsyncGRPOConfig add, and what GRPO says otherwise.
GRPO = {
    "model_init_kwargs": SFT["model_init_kwargs"],
    "router_aux_loss_coef": SFT["router_aux_loss_coef"],
    "vllm_server_base_url": _VLLM,
    "vllm_server_timeout": _VLLM,
    "request_timeout": _VLLM,
    "weight_sync_timeout": "weights are files that a worker maps: heartbeat_stale_after_s notices one that hangs",
    "max_tool_calling_iterations": _TOOLS,
    "fork_threshold_tokens": _TOOLS,
    "use_vllm": _VLLM,
    "vllm_mode": _VLLM,
    "vllm_model_impl": _VLLM,
    "vllm_enable_sleep_mode": _VLLM,
    "vllm_gpu_memory_utilization": _VLLM,
    "vllm_group_port": _VLLM,
    "vllm_max_model_length": _VLLM,
    "vllm_server_host": _VLLM,
    "vllm_server_port": _VLLM,
    "vllm_structured_outputs_regex": _VLLM,
    "vllm_tensor_parallel_size": _VLLM,
    "vllm_importance_sampling_correction": "importance_sampling_mode is none or the kind of correction",
    "vllm_importance_sampling_mode": _CORRECTION.format("mode"),
    "vllm_importance_sampling_clip_max": _CORRECTION.format("clip_max"),
    "vllm_importance_sampling_clip_min": _CORRECTION.format("clip_min"),
    "vllm_importance_sampling_cap": _CORRECTION.format("clip_max"),
    "use_transformers_continuous_batching": _VLLM,
    "transformers_continuous_batching_config": _VLLM,
    "use_transformers_paged": _VLLM,
    "cache_implementation": _VLLM,
    "generation_kwargs": "name the option itself: temperature, top_p, top_k, min_p, repetition_penalty",
    "generation_batch_size": _CHUNKS,
    "steps_per_generation": _CHUNKS,
    "ds3_gather_for_generation": _DEVICES,
    "disable_dropout": "Qwen3 has no dropout",
    "cast_lm_head_to_fp32": "log-probs are float32 sums whatever the compute dtype",
    "pad_to_multiple_of": "rows have token_budget tokens",
    "sapo_temperature_neg": _OTHER_LOSS,
    "sapo_temperature_pos": _OTHER_LOSS,
    "vespo_k_pos": _OTHER_LOSS,
    "vespo_lambda_pos": _OTHER_LOSS,
    "vespo_k_neg": _OTHER_LOSS,
    "vespo_lambda_neg": _OTHER_LOSS,
    "multi_objective_aggregation": "rewards are summed, then normalised",
    "sync_ref_model": "the reference is the initial model",
    "ref_model_mixup_alpha": "the reference is the initial model",
    "ref_model_sync_steps": "the reference is the initial model",
    "top_entropy_quantile": "all tokens of a completion are trained",
    "entropy_coef": _ENTROPY,
    "use_adaptive_entropy": _ENTROPY,
    "entropy_coef_min": _ENTROPY,
    "entropy_coef_max": _ENTROPY,
    "entropy_coef_delta": _ENTROPY,
    "entropy_target": _ENTROPY,
    "off_policy_mask_threshold": "max_staleness bounds how old completions are",
    "log_multimodal": "only text is supported",
    "log_unique_prompts": "completions are printed by group: num_completions_to_print",
    "log_completions_hub_repo": _HUB,
    "per_device_eval_batch_size": "evaluation prompts are sampled by the rollout workers, rollout_slots together",
    "dataset_num_proc": "prompts are tokenized in one process",
    "dataset_streaming": "prompts are numbered over the whole data set",
    "optim_args": "the optimizer is AdamW: pass another as AsyncGRPOTrainer(optimizers=(optax transformation, None))",
    "auto_find_batch_size": "row sizes are fixed before the first step: lower token_budget",
    "prediction_loss_only": "evaluation gives rewards",
    "include_for_metrics": "evaluation gives rewards",
    "batch_eval_metrics": "evaluation gives rewards",
    "eval_accumulation_steps": "evaluation gives rewards",
    "eval_use_gather_object": "evaluation gives rewards",
    "eval_do_concat_batches": "evaluation gives rewards",
}

# Keyword arguments of TRL's and Transformers' trainers, today's and older ones.
ARGUMENTS = {
    "tokenizer": "it is called processing_class",
    "data_collator": "batches are token rows built by jaxtrl: prepare the data with formatting_func, or pass input_ids "
    "and labels",
    "model_init": "pass a path, a hub id or a Qwen3 as model; SFTConfig(seed=...) decides random weights",
    "compute_loss_func": "the loss is part of the compiled step: use SFTConfig(loss_type=...), or your own loop with "
    "make_sft_step",
    "optimizer_cls_and_kwargs": "pass optimizers=(optax transformation, learning-rate schedule or None)",
    "preprocess_logits_for_metrics": "logits are never kept: compute_metrics gets log-prob, entropy and hit of each "
    "trained token",
    "quantization_config": _QUANTISED,
    "peft_config": f"{_LORA}: leave it out",
}

# Those of TRL's AsyncGRPOTrainer and GRPOTrainer.
GRPO_ARGUMENTS = ARGUMENTS | {
    "compute_loss_func": "the loss is part of the compiled step: use AsyncGRPOConfig(loss_type=...), or your own loop "
    "with make_grpo_step",
    "compute_metrics": "evaluation gives rewards: write what you want to know as a reward function of weight 0",
    "formatting_func": "rewards see the prompt as it stands in the column prompt",
    "reward_processing_classes": "a reward is a function: let it call your reward model",
    "tools": _TOOLS,
    "rollout_func": "it is called rollout: an object with the methods of jaxtrl.rollout.groups.Rollout",
    "environment_factory": _TOOLS,
    "rollout_worker": "it is called rollout: an object with the methods of jaxtrl.rollout.groups.Rollout",
    "weight_transfer": "the rollout takes new weights by its method publish",
}

# Fields of trl.ModelConfig, trl.ScriptArguments and trl.DatasetMixtureConfig, which TRL's sft command takes too.
SCRIPT = {
    "model_revision": "give the folder of that revision as model_name_or_path",
    "attn_implementation": "there is one attention function",
    "use_peft": _LORA,
    "lora_r": _LORA,
    "lora_alpha": _LORA,
    "lora_dropout": _LORA,
    "lora_target_modules": _LORA,
    "lora_target_parameters": _LORA,
    "lora_modules_to_save": _LORA,
    "lora_task_type": _LORA,
    "use_rslora": _LORA,
    "use_dora": _LORA,
    "load_in_8bit": _QUANTISED,
    "load_in_4bit": _QUANTISED,
    "bnb_4bit_quant_type": _QUANTISED,
    "use_bnb_nested_quant": _QUANTISED,
    "bnb_4bit_quant_storage": _QUANTISED,
    "ignore_bias_buffers": _TORCH,
    "datasets": _MIXTURE,
    "streaming": "it is called dataset_streaming",
    "test_split_size": "it belongs to data-set mixtures: name the evaluation data with eval_dataset_name",
    "env": "set environment variables before the command starts, JAX reads them first",
}

# Names that older releases of TRL and Transformers had.
OLD = {
    "max_seq_length": "TRL renamed it: use max_length",
    "warmup_ratio": "Transformers 5 writes it as warmup_steps below 1",
    "evaluation_strategy": "Transformers renamed it: use eval_strategy",
    "no_cuda": "set JAX_PLATFORMS=cpu in the environment",
    "group_by_length": "rows are flattened, lengths need no grouping",
    "logging_dir": "metrics are written to output_dir/metrics.jsonl",
    "torch_dtype": "it is called dtype",
    "dataset_batch_size": "tokenizing chooses its own batch size",
    "num_of_sequences": "rows have max_length tokens: use packing",
    "chars_per_token": "rows have max_length tokens: use packing",
    "overwrite_output_dir": "use another output_dir, or resume_from_checkpoint",
}

REFUSED = TRAINING | SCRIPT | OLD
