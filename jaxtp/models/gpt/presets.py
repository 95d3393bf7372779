"""Published sizes of GPT-2 and its successors.

`gpt3-175b` is the last row of table 2.1 of Brown et al. 2020, `gpt-1t` the last row of table 1 of
Narayanan et al. 2021 (Megatron-LM on 3072 GPUs).
"""

from jaxtp.models.gpt.config import GPTConfig

PRESETS: dict[str, GPTConfig] = {
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
