"""Make the tiny Hugging Face checkpoints of the tests, and check what `save_hf` writes.

    pip install torch transformers==4.57.3 safetensors
    python scripts/make_hf_fixtures.py           # writes tests/fixtures/hf/*: weights and logits
    python scripts/make_hf_fixtures.py --check   # with jaxtp: load_hf -> save_hf -> transformers

Every parameter is random, norms and biases too, so that a wrong name or a wrong transpose shows in
the logits. `--check` loads each fixture with jaxtp, saves it, loads that with transformers, and
compares the logits bit for bit with those of the fixture. It prints one line per family and keeps
the config.json that save_hf made as tests/fixtures/hf/FAMILY/saved_config.json. The tests then need
no PyTorch: files equal to those that were checked here give the same logits.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

FIXTURES = Path(__file__).parent.parent / "tests" / "fixtures" / "hf"
BATCH, LENGTH, VOCAB = 2, 16, 99  # 99 divides by no tensor-parallel size but 1

ROTARY = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LATENT = {"kv_lora_rank": 12, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 8}

# Heads: 8 q / 2 kv do not divide on 4 and 8 devices, 6 q / 2 kv neither, one kv head never.
MODELS = {
    "llama": transformers.LlamaConfig(
        **ROTARY, num_attention_heads=8, num_key_value_heads=2, head_dim=8, rope_scaling=LLAMA3_ROPE
    ),
    "mistral": transformers.MistralConfig(
        **ROTARY, num_attention_heads=4, num_key_value_heads=2, head_dim=6, sliding_window=5
    ),
    "qwen2": transformers.Qwen2Config(
        **ROTARY | {"hidden_size": 48},
        num_attention_heads=6,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
    "qwen3": transformers.Qwen3Config(
        **ROTARY,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=6,
        use_sliding_window=True,
        sliding_window=7,
        max_window_layers=0,
    ),
    "gemma": transformers.GemmaConfig(
        **ROTARY, num_attention_heads=4, num_key_value_heads=1, head_dim=10
    ),
    "gpt2": transformers.GPT2Config(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=3,
        n_head=4,
        n_positions=80,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "mixtral": transformers.MixtralConfig(
        **ROTARY, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_local_experts=4
    ),
    # Caps and windows small enough to be felt by 16 tokens.
    "gemma2": transformers.Gemma2Config(
        **ROTARY,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        query_pre_attn_scalar=12,
        sliding_window=5,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=5.0,
    ),
    "gemma3_text": transformers.Gemma3TextConfig(
        **ROTARY,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=10,
        query_pre_attn_scalar=9,
        sliding_window=6,
        sliding_window_pattern=3,
        rope_theta=5000.0,
        rope_local_base_freq=100.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    ),
    "phi3": transformers.Phi3Config(
        **ROTARY,
        num_attention_heads=4,
        num_key_value_heads=2,
        partial_rotary_factor=0.75,
        sliding_window=9,
        pad_token_id=0,
    ),
    "olmo2": transformers.Olmo2Config(**ROTARY, num_attention_heads=8, num_key_value_heads=4),
    "smollm3": transformers.SmolLM3Config(
        **ROTARY,
        num_attention_heads=4,
        num_key_value_heads=2,
        no_rope_layer_interval=2,
        use_sliding_window=True,
        sliding_window=5,
        pad_token_id=0,
    ),
    "qwen3_moe": transformers.Qwen3MoeConfig(
        **ROTARY,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=16,
        norm_topk_prob=True,
    ),
    # Softmax and groups; what is rotated is also made larger. No tensor for queries of low rank.
    "deepseek_v2": transformers.DeepseekV2Config(
        **ROTARY,
        **LATENT,
        q_lora_rank=None,
        num_attention_heads=4,
        first_k_dense_replace=1,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_shared_experts=2,
        moe_intermediate_size=16,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.5,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 8.0,
            "beta_fast": 4.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 32,
        },
    ),
    # Sigmoid, a correction and groups; scores are scaled too.
    "deepseek_v3": transformers.DeepseekV3Config(
        **ROTARY,
        **LATENT,
        q_lora_rank=20,
        num_attention_heads=8,
        num_key_value_heads=8,
        first_k_dense_replace=1,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_shared_experts=1,
        moe_intermediate_size=16,
        n_group=4,
        topk_group=2,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 8.0,
            "beta_fast": 4.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 32,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
        },
    ),
    # Windows, sinks and a ramp between pairs that 16 tokens feel; biases wherever there can be one.
    "gpt_oss": transformers.GptOssConfig(
        **ROTARY,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=8,
        num_experts_per_tok=3,
        sliding_window=5,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 8.0,
            "beta_fast": 4.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 32,
        },
    ),
}
"""Family -> config."""

LENGTHS = [1, 2, 5, 9, 12, 16, 3, 7]
"""Tokens of the prompts that are answered."""

BF16 = {"qwen2"}
"""Saved in bfloat16 over several files with an index; the others in one float32 file."""


def make(family: str) -> None:
    """Writes one fixture: the checkpoint, tokens and their logits."""
    folder = FIXTURES / family
    shutil.rmtree(folder, ignore_errors=True)
    torch.manual_seed(list(MODELS).index(family))
    model = transformers.AutoModelForCausalLM.from_config(MODELS[family]).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # About the size that keeps activations at one; norms around their neutral value.
            neutral = 1.0 if "norm" in name or ".ln_" in name else 0.0
            neutral *= name.endswith("weight") and not family.startswith("gemma")
            spread = 0.2 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
            parameter.copy_(neutral + spread * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.rand_like(buffer))
    model = model.to(torch.bfloat16 if family in BF16 else torch.float32)
    model.save_pretrained(folder, max_shard_size="40KB" if family in BF16 else "5GB")
    tokens = torch.randint(0, VOCAB, (BATCH, LENGTH))
    np.savez(folder / "expected.npz", tokens=tokens.numpy(), logits=logits(folder, tokens))
    np.savez_compressed(folder / "generated.npz", **generated(folder))


def generated(folder: Path) -> dict[str, np.ndarray]:
    """What transformers adds to ragged prompts, each alone, always the likeliest token."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    longest = getattr(model.config, "n_positions", 96)
    lengths = np.minimum(LENGTHS, longest // 2)
    count = min(64, longest - lengths.max())
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, VOCAB, (len(lengths), lengths.max()))
    answers = []
    for prompt, length in zip(prompts, lengths, strict=True):
        tokens = torch.from_numpy(prompt[None, :length])
        options = {"max_new_tokens": int(count), "do_sample": False, "eos_token_id": None}
        with torch.no_grad():
            out = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
        answers.append(out[0, length:].numpy())
    return {"prompts": prompts, "lengths": lengths, "answers": np.stack(answers)}


def logits(folder: Path, tokens: torch.Tensor) -> np.ndarray:
    """What transformers computes from a folder, in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return model.eval()(tokens, use_cache=False).logits.numpy()


def check(family: str) -> bool:
    """Whether a fixture, loaded and saved by jaxtp, gives transformers the same logits."""
    import jaxtp
    from jaxtp.io.hf import load_hf, save_hf

    folder = FIXTURES / family
    expected = np.load(folder / "expected.npz")
    with tempfile.TemporaryDirectory() as temporary:
        saved = Path(temporary) / family
        model, _ = load_hf(folder, jaxtp.make_mesh(tp=1), progress=False)
        save_hf(model, saved, progress=False, file_bytes=40_000 if family in BF16 else 5 * 10**9)
        shutil.copy(saved / "config.json", folder / "saved_config.json")
        kind = json.loads((saved / "config.json").read_text())["model_type"]
        got = logits(saved, torch.from_numpy(expected["tokens"]))
    same = bool((got == expected["logits"]).all())
    print(f"{family}: saved as {kind}, logits {'equal' if same else 'DIFFER'}")
    return same


def main() -> None:
    """Makes or checks all fixtures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="check save_hf against transformers")
    parser.add_argument("families", nargs="*", default=list(MODELS), help="default: all")
    arguments = parser.parse_args()
    if arguments.check:
        # A list: every family is checked and printed.
        raise SystemExit(not all([check(family) for family in arguments.families]))
    for family in arguments.families:
        make(family)
        size = sum(file.stat().st_size for file in (FIXTURES / family).iterdir())
        print(f"{family}: {size:,} bytes")


if __name__ == "__main__":
    main()
