"""jaxtrl: post-training of Qwen3 language models in JAX/Flax."""
