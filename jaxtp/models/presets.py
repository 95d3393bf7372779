"""Published model sizes by name.

Sizes are those of the `config.json` beside the published weights; `gpt3-175b` is the last row of
table 2.1 of Brown et al. 2020, `gpt-1t` the last row of table 1 of Narayanan et al. 2021
(Megatron-LM on 3072 GPUs).
"""

from jaxtp.models.gpt import GPTConfig
from jaxtp.models.llama import LlamaConfig, RopeScaling

Config = LlamaConfig | GPTConfig

PRESETS: dict[str, Config] = {
    # Learns bytes on a laptop: heads and kv heads divide by tp=4, and fp32 because CPUs have no
    # bf16 units.
    "llama-tiny": LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        intermediate_size=384,
        dtype="float32",
    ),
    "llama2-7b": LlamaConfig(
        vocab_size=32000,
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        head_dim=128,
        intermediate_size=11008,
    ),
    "llama2-70b": LlamaConfig(
        vocab_size=32000,
        hidden_size=8192,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=28672,
    ),
    "llama3-8b": LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=14336,
        rope_theta=500_000.0,
    ),
    "llama3-70b": LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=28672,
        rope_theta=500_000.0,
    ),
    # 405B exists as 3.1 only, hence the stretched frequencies.
    "llama3-405b": LlamaConfig(
        vocab_size=128256,
        hidden_size=16384,
        num_hidden_layers=126,
        num_attention_heads=128,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=53248,
        rope_theta=500_000.0,
        rope_scaling=RopeScaling(
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        ),
    ),
    "llama3.2-1b": LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        intermediate_size=8192,
        rope_theta=500_000.0,
        rope_scaling=RopeScaling(
            factor=32.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        ),
        tie_word_embeddings=True,
    ),
    "tinyllama-1.1b": LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=64,
        intermediate_size=5632,
    ),
    "qwen3-8b": LlamaConfig(
        vocab_size=151936,
        hidden_size=4096,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=12288,
        rms_norm_eps=1e-6,
        rope_theta=1_000_000.0,
        qk_norm=True,
    ),
    "gpt2": GPTConfig(
        vocab_size=50257,
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        max_position_embeddings=1024,
    ),
    "gpt2-medium": GPTConfig(
        vocab_size=50257,
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        max_position_embeddings=1024,
    ),
    "gpt2-large": GPTConfig(
        vocab_size=50257,
        hidden_size=1280,
        num_hidden_layers=36,
        num_attention_heads=20,
        max_position_embeddings=1024,
    ),
    "gpt2-xl": GPTConfig(
        vocab_size=50257,
        hidden_size=1600,
        num_hidden_layers=48,
        num_attention_heads=25,
        max_position_embeddings=1024,
    ),
    "gpt3-175b": GPTConfig(
        vocab_size=50257,
        hidden_size=12288,
        num_hidden_layers=96,
        num_attention_heads=96,
        max_position_embeddings=2048,
    ),
    "gpt-1t": GPTConfig(
        vocab_size=51200,
        hidden_size=25600,
        num_hidden_layers=128,
        num_attention_heads=160,
        max_position_embeddings=2048,
    ),
}
"""Preset name -> config; `dataclasses.replace` changes single fields."""
