"""Small parameter trees for the planner's tests, and plans of them as text."""

import jax

import jaxtp
from jaxtp.plan.specs import spec_text


def structs(shapes, dtype="bfloat16"):
    """A flat tree of shapes as `jax.ShapeDtypeStruct`."""
    return {path: jax.ShapeDtypeStruct(shape, dtype) for path, shape in shapes.items()}


def plan(shapes, tp, **options):
    return jaxtp.make_plan(structs(shapes), {"tp": tp}, **options)


def specs(result):
    """Spec of every parameter as text."""
    return {d.path: spec_text(d.spec) for d in result.decisions}


def attention(hidden, q, kv, prefix="attn"):
    """Flat kernels: q and kv are widths in elements."""
    return {
        f"{prefix}/q_proj/kernel": (hidden, q),
        f"{prefix}/k_proj/kernel": (hidden, kv),
        f"{prefix}/v_proj/kernel": (hidden, kv),
        f"{prefix}/o_proj/kernel": (q, hidden),
    }


def mlp(hidden, ffn, prefix="mlp"):
    return {
        f"{prefix}/gate_proj/kernel": (hidden, ffn),
        f"{prefix}/up_proj/kernel": (hidden, ffn),
        f"{prefix}/down_proj/kernel": (ffn, hidden),
    }


def norms(hidden):
    return {"norm1/scale": (hidden,), "norm2/scale": (hidden,)}


def vocab(tokens, hidden):
    return {"embed_tokens/embedding": (tokens, hidden), "lm_head/kernel": (hidden, tokens)}


def layers(count, block):
    return {f"layers/{i}/{path}": shape for i in range(count) for path, shape in block.items()}


def llama(hidden=64, heads=8, kv_heads=4, head_dim=16, ffn=128, tokens=512, num_layers=2, **_):
    """A small decoder, unrolled."""
    block = attention(hidden, heads * head_dim, kv_heads * head_dim) | mlp(hidden, ffn)
    return vocab(tokens, hidden) | layers(num_layers, block | norms(hidden))
