"""Generation: the tokens of transformers on every mesh, sampling, ends of answers, refusals.

`generated.npz` beside each fixture holds what `transformers` answered to eight ragged prompts; see
`scripts/make_hf_fixtures.py`.
"""

import dataclasses
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rounding
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxtp
from jaxtp import models
from jaxtp.errors import BadConfig, BadPrompt, BadStages, JaxtpWarning, PlanMismatch
from jaxtp.generation import run
from jaxtp.generation.sampling import Sampling, choose, threshold
from jaxtp.io.hf import load_hf
from jaxtp.mesh.build import make_mesh
from jaxtp.models import cache
from jaxtp.models.attention import attend
from jaxtp.models.registry import FAMILIES

FIXTURES = Path(__file__).parent / "fixtures" / "hf"
# 99 tokens divide by no tensor-parallel size: the vocabulary is replicated on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:TP043")
FLOAT32 = {"param_dtype": "float32", "dtype": "float32", "progress": False}
SAMPLED = {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "max_new_tokens": 8}
PROMPTS = [[5, 7, 9], [1], [11, 12, 13, 14, 15, 16]]


def load(family, **sizes):
    count = math.prod(sizes.values())
    mesh = make_mesh(**sizes, devices=jax.devices()[:count])
    return load_hf(FIXTURES / family, mesh, **FLOAT32)[0]


@pytest.fixture(scope="module")
def llama():
    return load("llama", tp=1)


class Letters:
    """A tokenizer of one letter a token."""

    def encode(self, text):
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, tokens):
        return "".join(chr(ord("a") + token) for token in tokens)


# On the meshes of MESHES the default suite runs one family, the whole gate every one.
MESHES = [{"tp": 2}, {"tp": 4}, {"tp": 8}, {"dp": 2, "tp": 4}]
CASES = [(family, {"tp": 8}) for family in FAMILIES] + [("llama", sizes) for sizes in MESHES]


def row(family, sizes):
    return family + "".join(f"-{axis}{size}" for axis, size in sizes.items())


@pytest.mark.parametrize(("family", "sizes"), CASES, ids=[row(*one) for one in CASES])
def test_greedy_tokens_are_those_of_transformers(family, sizes):
    want = np.load(FIXTURES / family / "generated.npz")
    rows = zip(want["prompts"], want["lengths"], strict=True)
    prompts = [prompt[:length].tolist() for prompt, length in rows]
    answers = jaxtp.generate(
        load(family, **sizes), prompts, max_new_tokens=want["answers"].shape[1]
    )
    np.testing.assert_array_equal([answer.tokens for answer in answers], want["answers"])


def test_log_probabilities_are_those_of_the_whole_sequence(llama):
    for answer in jaxtp.generate(llama, PROMPTS, max_new_tokens=5):
        prompt = PROMPTS[answer.prompt]
        logits = llama(jnp.array([[*prompt, *answer.tokens]]))[0]
        nats = jax.nn.log_softmax(logits)[len(prompt) - 1 : -1]
        want = nats[np.arange(5), np.array(answer.tokens)]
        np.testing.assert_allclose(answer.log_probabilities, want, atol=1e-4)


@pytest.mark.parametrize("window", [None, 5])
def test_long_prompts_attend_in_blocks_to_the_same(monkeypatch, window):
    """Also where only some layers have the window, and scores a soft cap."""
    monkeypatch.setattr(cache, "QUERY_BLOCK", 8)
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (
        jax.random.normal(key, (2, 32, *heads))  # values may be narrower than keys
        for key, heads in zip(keys, ((6, 4), (2, 4), (2, 3)), strict=True)
    )
    segments = (jnp.arange(32)[None] >= jnp.array([[3], [20]])).astype(jnp.int32)
    for has_window in (None, True, False) if window else (None,):
        for softcap in (None, 2.0):
            options = {"scale": 0.3, "softcap": softcap}
            options["has_window"] = None if has_window is None else jnp.array(has_window)
            got = cache.in_blocks(q, k, v, segments, window, **options)
            want = attend(q, k, v, segments, "xla", window, **options)
            rounding.assert_close(got, want, terms=32 + 4)


def test_the_same_key_draws_the_same_tokens_on_every_mesh(llama):
    key = jax.random.key(3)
    want = jaxtp.generate(llama, PROMPTS, samples=2, key=key, **SAMPLED)
    got = jaxtp.generate(load("llama", dp=2, tp=4), PROMPTS, samples=2, key=key, **SAMPLED)
    assert [a.tokens for a in got] == [a.tokens for a in want]
    assert [(a.prompt, a.sample) for a in want] == [(i, j) for i in range(3) for j in range(2)]
    assert len({a.tokens for a in want}) == 6
    alone = jaxtp.generate(llama, PROMPTS[:1], key=key, **SAMPLED)
    assert alone[0].tokens == want[0].tokens


def test_a_second_call_compiles_nothing(llama):
    def call(prompts, temperature):
        jaxtp.generate(
            llama,
            prompts,
            max_new_tokens=6,
            end_tokens=(98,),
            temperature=temperature,
            top_p=1 - temperature / 3,
            min_p=temperature / 9,
        )

    def compiled():
        programs = (run.prompt_program, run.token_program)
        return [program.cache_info().misses for program in programs]

    compiles: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **__: compiles.append(event) if "backend_compile" in event else None
    )
    call(PROMPTS, 0.7)
    assert compiles
    before = compiled()
    compiles.clear()
    call([[3, 4], [5], [6, 7, 8, 9]], 0.3)
    assert not compiles  # not only these two programs: nothing at all
    assert compiled() == before
    call(PROMPTS, 0.0)
    assert compiled() != before  # the likeliest token is another program


def test_rows_end_at_end_tokens_and_stop_strings(llama):
    (plain,) = jaxtp.generate(llama, [[5, 7, 9]], max_new_tokens=12)
    assert plain.ended == "length"
    assert len(plain.tokens) == 12
    end = plain.tokens[3]
    first = plain.tokens.index(end)
    (ended,) = jaxtp.generate(llama, [[5, 7, 9]], max_new_tokens=12, end_tokens=(end,))
    assert (ended.tokens, ended.ended) == (plain.tokens[: first + 1], "end")
    letters, shown = Letters(), []
    text = letters.decode(plain.tokens)
    (stopped,) = jaxtp.generate(
        llama,
        "fhj",
        max_new_tokens=12,
        tokenizer=letters,
        stop=(text[5:7],),
        on_text=lambda row, new: shown.append((row, new)),
    )
    assert (stopped.text, stopped.ended) == (text[: text.find(text[5:7])], "stop")
    assert "".join(new for _, new in shown) == stopped.text


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.6}, {0, 1}),  # 0.5 alone is too few
        ({"top_p": 0.5}, {0}),
        ({"min_p": 0.4}, {0, 1}),  # 0.25 is half as likely as 0.5, 0.15 is not
        ({"top_k": 3, "top_p": 0.8}, {0, 1}),  # of the three: 0.56, 0.28, 0.17
        ({}, {0, 1, 2, 3}),
    ],
)
def test_thresholds_keep_the_tokens_they_should(sampling, kept):
    logits = jnp.log(jnp.array([[0.5, 0.25, 0.15, 0.1]]))
    least = threshold(logits, Sampling(temperature=1.0, **sampling))
    assert {i for i in range(4) if logits[0, i] >= least[0]} == kept


def test_a_nucleus_larger_than_the_candidates_is_found_among_all():
    logits = jax.random.normal(jax.random.key(0), (2, 1000)) * 0.1
    probabilities = np.sort(np.asarray(jax.nn.softmax(logits)), axis=-1)[:, ::-1]
    count = (np.cumsum(probabilities, axis=-1) < 0.7).sum(-1) + 1
    least = threshold(logits, Sampling(temperature=1.0, top_p=0.7))
    got = (np.asarray(logits) >= np.asarray(least)[:, None]).sum(-1)
    assert (count > 300).all()
    assert (abs(got - count) <= 1).all()  # sums of floats in two orders


def test_drawn_tokens_have_the_probabilities_of_the_model():
    probabilities = jnp.array([0.5, 0.3, 0.15, 0.05])
    rows = 4000
    keys = jax.random.split(jax.random.key(1), rows)
    logits = jnp.tile(jnp.log(probabilities)[None], (rows, 1))
    tokens, nats = choose(logits, Sampling(temperature=1.0), keys)
    share = np.bincount(np.asarray(tokens), minlength=4) / rows
    # Four standard deviations of a share.
    bound = 4 * np.sqrt(probabilities * (1 - probabilities) / rows)
    assert (np.abs(share - probabilities) < bound).all()
    np.testing.assert_allclose(nats, jnp.log(probabilities)[tokens], atol=1e-6)
    assert choose(jnp.array([[1.0, 3.0, 3.0]]), Sampling(), keys[:1])[0].tolist() == [1]


BAD = {
    "no prompts": ({"prompts": []}, "TP140 at prompts: no prompts"),
    "an empty prompt": ({"prompts": [[1], []]}, r"TP140 at prompts\[1\]: no tokens"),
    "an unknown token": ({"prompts": [[99]]}, "token 99 of a vocabulary of 99"),
    "a negative token": ({"prompts": [[-1]]}, "token -1 of a vocabulary"),
    "text": ({"prompts": "abc"}, "text without a tokenizer"),
    "no room": ({"max_context": 10}, r"3 tokens and 8 new ones, where 10 fit\n.*max_new_tokens=7"),
    "nothing to add": ({"max_new_tokens": 0}, "max_new_tokens is 0"),
    "no samples": ({"samples": 0}, "samples is 0"),
    "stop without text": ({"stop": ("x",)}, "stop strings without a tokenizer"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD)
def test_prompts_that_cannot_be_answered_are_refused(llama, change, message):
    arguments = {"prompts": [[1, 2, 3]], "max_new_tokens": 8, **change}
    with pytest.raises(BadPrompt, match=message):
        jaxtp.generate(llama, **arguments)


def test_positions_that_do_not_exist_are_refused():
    with pytest.raises(BadPrompt, match="76 tokens and 8 new ones, where 80 fit"):
        jaxtp.generate(load("gpt2", tp=1), [[1] * 76], max_new_tokens=8)


@pytest.mark.parametrize(
    "change", [{"temperature": -1}, {"top_k": -1}, {"top_p": 0.0}, {"min_p": 1.5}]
)
def test_settings_out_of_bounds_are_refused(llama, change):
    (name,) = change
    with pytest.raises(BadConfig, match=f"TP020 at {name}: {name} is"):
        jaxtp.generate(llama, PROMPTS, **change)


def test_stages_and_other_plans_are_refused():
    staged = load("llama", pp=3, tp=2)
    with pytest.raises(BadStages, match="lies in pipeline stages"):
        jaxtp.generate(staged, PROMPTS)
    model = load("llama", tp=2)
    other = jaxtp.make_plan(model, {"tp": 2}, config=model.config, overrides={r"mlp/.*_proj": P()})
    with pytest.raises(PlanMismatch, match="the plan says"):
        jaxtp.generate(model, PROMPTS, plan=other)


def test_adapters_answer_alike_beside_their_kernels_and_merged():
    lora = models.Lora(rank=4, alpha=8.0, targets=("q_proj", "o_proj", "down_proj"))
    float32 = {"param_dtype": "float32", "dtype": "float32"}
    config = dataclasses.replace(models.config_of("llama-tiny"), lora=lora, **float32)
    model = models.build(config)
    noise = jax.random.normal(jax.random.key(5), (1000,)) * 0.3
    adapters = nnx.state(model, nnx.LoRAParam)
    nnx.update(model, jax.tree.map(lambda x: jnp.resize(noise, x.shape), adapters))
    mesh = make_mesh(dp=2, tp=4)
    placed = jaxtp.shard(model, mesh, config=config)
    beside = jaxtp.generate(placed, PROMPTS, max_new_tokens=6)
    models.merge_lora(placed)
    merged = jaxtp.generate(placed, PROMPTS, max_new_tokens=6)
    assert [a.tokens for a in merged] == [a.tokens for a in beside]
    plain = models.build(dataclasses.replace(config, lora=None))
    without = jaxtp.generate(plain, PROMPTS, max_new_tokens=6)
    assert [a.tokens for a in without] != [a.tokens for a in beside]


def test_rollouts_use_the_arrays_of_training_where_the_plans_agree():
    config = models.config_of("llama-tiny")
    model = models.build(config)
    mesh = make_mesh(dp=2, tp=4)
    training = jaxtp.make_plan(model, mesh, config=config)
    placed = jaxtp.shard(model, mesh, plan=training)
    rollout = jaxtp.make_plan(model, mesh, config=config, zero=0)
    assert training.moved_bytes(rollout) == 0
    again = jaxtp.shard(placed, mesh, plan=rollout)
    before, after = (jax.tree.leaves(nnx.state(m)) for m in (placed, again))
    pairs = zip(before, after, strict=True)
    assert all(
        a.addressable_data(0).unsafe_buffer_pointer()
        == b.addressable_data(0).unsafe_buffer_pointer()
        for a, b in pairs
    )


def test_parameters_sharded_over_the_batch_axes_are_gathered_once_or_warned_of():
    config = models.config_of("llama-tiny")
    model = models.build(config)
    mesh = make_mesh(fsdp=2, tp=4)
    training = jaxtp.make_plan(model, mesh, config=config)
    rollout = jaxtp.make_plan(model, mesh, config=config, zero=0)
    # A device has half of what it needs, of all that fsdp shards.
    cut = [d for d in training.decisions if d.dim_on(("fsdp",)) is not None]
    assert training.moved_bytes(rollout) == sum(d.bytes_per_device(training.mesh) for d in cut)
    assert rollout.moved_bytes(training) == 0  # shards of what is there already
    placed = jaxtp.shard(model, mesh, plan=training)
    with pytest.warns(JaxtpWarning, match="TP043: fsdp shard parameters too, and every token"):
        slow = jaxtp.generate(placed, PROMPTS, max_new_tokens=4, plan=training)
    moved = jaxtp.shard(placed, mesh, plan=rollout)
    fast = jaxtp.generate(moved, PROMPTS, max_new_tokens=4, plan=rollout)
    assert [a.tokens for a in fast] == [a.tokens for a in slow]
    with pytest.raises(PlanMismatch, match="not the same number of devices"):
        training.moved_bytes(jaxtp.make_plan(model, {"tp": 4}, config=config))
