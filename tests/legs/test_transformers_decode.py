"""Decoding with `past_key_values` of transformers' Flax models, unmodified, all names scrambled.

    python -m pytest tests/legs/test_transformers_decode.py

Needs what `test_transformers.py` needs. Two layers at tiny widths: sixteen steps on eight simulated
devices beside the plain function, and the program for eight H100.
"""

import functools
import sys
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from test_transformers import as_the_library_expects  # noqa: F401

sys.path.insert(0, str(Path(__file__).parents[1]))
import compiled_programs
import rounding

import jaxtp
from jaxtp.compile.collectives import find
from jaxtp.compile.hlo import parse
from jaxtp.compile.options import PREFLIGHT

pytestmark = pytest.mark.filterwarnings("ignore")
BATCH, SLOTS, STEPS, LAYERS, WIDTH, VOCAB = 4, 24, 16, 2, 64, 2048
GROUPED = {
    "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 8,
    "num_key_value_heads": 4, "intermediate_size": 192, "vocab_size": VOCAB, "head_dim": 16,
    "max_position_embeddings": 64,  # the module has a mask of its square
}  # fmt: skip
GPT = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": 8, "n_positions": 64, "vocab_size": VOCAB}
T5 = {
    "d_model": WIDTH, "d_kv": 16, "d_ff": 192, "num_layers": LAYERS, "num_heads": 8,
    "vocab_size": VOCAB,
}  # fmt: skip

# Model, its config, all-reduces a layer: T5 has cross attention too.
MODELS = {
    "gpt2": ("GPT2LMHeadModel", "GPT2", GPT, 2),
    "mistral": ("MistralForCausalLM", "Mistral", GROUPED | {"sliding_window": None}, 2),
    "gemma": ("GemmaForCausalLM", "Gemma", GROUPED | {"num_key_value_heads": 1}, 2),
    "t5": ("T5ForConditionalGeneration", "T5", T5, 3),
}


def scrambled(tree):
    """The leaves under names that say nothing, and the way back."""
    flat, treedef = jax.tree.flatten(tree)
    names = [f"n{i:03d}" for i in np.random.default_rng(0).permutation(len(flat))]

    def back(named):
        return jax.tree.unflatten(treedef, [named[name] for name in names])

    return dict(zip(names, flat, strict=True)), back


@functools.cache
def case(name):
    """The decode step, its parameters, and (cache, token, position or encoder's states)."""
    cls, family, settings, _ = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**settings)
    model = getattr(transformers, f"Flax{cls}")(config, seed=0)
    params, params_of = scrambled(model.params)
    tokens = (jnp.arange(BATCH) * 37 + 3).astype(jnp.int32)
    seen = jnp.ones((BATCH, SLOTS), jnp.int32)
    if name == "t5":
        source = (jnp.arange(BATCH * 10).reshape(BATCH, 10) * 13 % VOCAB).astype(jnp.int32)
        states = model.encode(source).last_hidden_state
        empty, cache_of = scrambled(model.init_cache(BATCH, SLOTS, (states,)))

        def step(tree, xs, tok, at):
            call = functools.partial(model.decode, tok[:, None], (at,))
            out = call(
                decoder_attention_mask=seen, past_key_values=cache_of(xs), params=params_of(tree)
            )
            return out.logits[:, 0], scrambled(out.past_key_values)[0]

        return step, params, (empty, tokens, states)
    empty, cache_of = scrambled(model.init_cache(BATCH, SLOTS))

    def step(tree, xs, tok, at):
        out = model(
            tok[:, None],
            attention_mask=seen,
            position_ids=jnp.full((BATCH, 1), at),
            past_key_values=cache_of(xs),
            params=params_of(tree),
        )
        return out.logits[:, 0], scrambled(out.past_key_values)[0]

    return step, params, (empty, tokens, jnp.int32(0))


@pytest.mark.parametrize("name", MODELS)
def test_past_key_values_lie_as_an_expert_says_and_give_the_same(name):
    fn, params, (cache, tokens, at) = case(name)
    mesh = jaxtp.make_mesh(dp=2, tp=4)
    plan = jaxtp.make_plan(params, mesh, fn=fn, inputs=(cache, tokens, at))
    heads = () if name == "gemma" else ("tp",)  # one kv head: a copy on each device
    for decision in plan.inputs:
        if decision.argument == "xs":
            wanted = (("dp",), (), heads, ()) if len(decision.shape) == 4 else ()
            assert decision.spec == wanted, decision
    placed = jaxtp.shard_inputs(cache, plan, mesh)
    sharded = jaxtp.shard(params, mesh, plan=plan)
    step, plain = jaxtp.jit_decode(fn, plan, mesh), jax.jit(fn)
    for number in range(STEPS):
        at = at if name == "t5" else jnp.int32(number)
        want, cache = plain(params, cache, tokens, at)
        got, placed = step(sharded, placed, tokens, at)
        rounding.assert_close(got, want, terms=192 * LAYERS)
        tokens = jnp.argmax(want, axis=-1).astype(jnp.int32)
    assert step.jitted._cache_size() == 1


@pytest.mark.parametrize("name", MODELS)
def test_their_gpu_program_sends_all_reduces_alone(name):
    fn, params, inputs = case(name)
    mesh = compiled_programs.gpu_mesh(1, 8)
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, *inputs))
    plan = jaxtp.make_plan(params, mesh, fn=fn, inputs=inputs)
    sharded = jaxtp.shard(structs[0], mesh, plan=plan)
    lowered = jaxtp.jit_decode(fn, plan, mesh).lower(sharded, *structs[1:])
    compiled = lowered.compile(dict(PREFLIGHT))
    sent = Counter()
    for one in find(parse(compiled.as_text()), dict(plan.mesh.sizes)):
        sent[one.kind] += one.count
        assert one.num_bytes <= BATCH * WIDTH * 4 * 3, one
    want = {"all-reduce": 1 + MODELS[name][3] * LAYERS}  # and the lookup
    if name == "gpt2":  # one stored kernel makes queries, keys and values one after the other
        want["all-gather"] = LAYERS
    assert sent == want
    kept = sum(d.bytes_per_device(plan.mesh) for d in plan.inputs if d.role == "state")
    assert compiled.memory_analysis().alias_size_in_bytes == kept
