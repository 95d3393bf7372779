"""Mistakes of users: each ends in a coded error before anything compiles, never in a raw one.

A row is a call and the code of its error. Rows are cheap: tiny trees, shapes where shapes will do.
"""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtp
from jaxtp.plan.stages import Stages

TREE = {"up": {"kernel": np.ones((32, 128))}, "down": {"kernel": np.ones((128, 32))}}
QKVO = {f"{n}_proj": {"kernel": np.ones((64, 64))} for n in "qkvo"}
SIZES = {"dp": 2, "tp": 4}
X = np.ones((8, 32))
TX = optax.sgd(0.1)
NAN, INF = float("nan"), float("inf")


class Anything:
    """An object of no use, whose name is the same in every process."""

    def __repr__(self):
        return "an object"


ANYTHING = Anything()
FOLDER = jaxtp.Checkpoints("never written")
H100 = "h100:1x8"
HF = Path(__file__).parent / "fixtures" / "hf" / "llama"
NO_MESH = [None, 4, 2.5, "tp", [2, 4], (2, 4), {}, [], ANYTHING, TREE, jnp.ones(4), nn.Dense(4), TX]
NO_SIZE = ["4", None, 2.5, NAN, INF, True, 0, -1, [4], (), {}, b"4", "tp"]
NO_SPEC = [None, 4, "tp", {"tp": 0}, P(None, 4), P("dp", "dp"), P("nope"), P(None, None, "tp")]
NO_SPEC += [P(("tp", "tp")), ["a", 1], P("tp", "tp"), b"tp", True, 2.5, ANYTHING, {"a"}, P(("x",))]
NO_MAPPING = [["up"], "up", 4, ("up",), ANYTHING, P("tp"), {"up"}, b"up"]
NO_COUNT = ["8", 8.0, NAN, [8], (8,), True, b"8", {}, ANYTHING]
NO_INPUTS = [X, jnp.ones(4), "x", 4, {"x": X}, jax.ShapeDtypeStruct((8, 32), "float32"), P()]
NO_PLAN = ["plan", 4, {}, [], TREE, SIZES, ANYTHING, b"{}"]
NO_TREE = [None, "params", [], {}, (), {"a": "text"}, {"a": ANYTHING}, [None], {"a": len}]
NO_RUN = [None, 5, {}, [], TREE, ANYTHING, b"llama3-8b"]
NO_MODEL = [
    lambda: TREE["none"], lambda: 3, lambda: (loss, TREE), lambda: (loss, TREE, X),
    lambda: (loss, TREE, {"x": X}), lambda: jnp.ones(3) @ jnp.ones(4), lambda: 1 / 0,
]  # fmt: skip
BAD_FN = {
    "divides by zero": lambda p, x: 1 / 0,
    "asks for another parameter": lambda p, x: p["no"],
    "leaves jax": lambda p, x: np.asarray(x),
    "multiplies a dict": lambda p, x: p @ x,
    "branches on values": lambda p, x: x if x.sum() > 0 else -x,
    "returns None": lambda p, x: None,
    "returns text": lambda p, x: "loss",
    "returns nothing": lambda p, x: {},
}
NO_FLAG = [None, "no", 1, 0.0, [True]]
NO_NUMBER = ["60", NAN, INF, True, [1.0]]
NO_FUNCTION = [None, "fn", 4, TREE, []]
NO_OPTIONS = [4, "x", [1], {1: 2}, {"a": [1]}, {"a": None}]
NO_SHAPE = ["tp", None, 4, SIZES, ("tp",), (("tp", 2.5),), (("tp", 0),), (("tp", "2"),), ((2, 2),)]
NO_TX = ["adamw", 4, ANYTHING, [], {}, 0.1, optax.sgd]


def mesh():
    return jaxtp.make_mesh(tp=4, dp=2)


def loss(params, x):
    return x @ params["up"]["kernel"] @ params["down"]["kernel"]


def plan(tree=TREE, sizes=SIZES, **options):
    return jaxtp.make_plan(tree, sizes, **options)


def placed():
    return jaxtp.shard(TREE, mesh())


def donated():
    """A state that a step has taken over."""
    state = placed()
    jaxtp.jit_step(lambda s, b: s, state, mesh())(state, X)
    return state


def under(plan, mesh):
    with jaxtp.use_plan(plan, mesh):
        pass


def table():
    """What is wrong, the call, and the code of its error."""
    sized = [("mesh size", size) for size in NO_SIZE if not (isinstance(size, int) and size == -1)]
    for what, bad in sized:
        yield f"{what} {bad!r}", lambda bad=bad: plan(sizes={"tp": bad}), "TP010"
    for bad in NO_MESH:
        name = type(bad).__name__
        yield f"make_plan on {name} {bad!r:.9}", lambda bad=bad: plan(sizes=bad), "TP010"
        yield f"shard on {name} {bad!r:.9}", lambda bad=bad: jaxtp.shard(TREE, bad), "TP010"
        yield (
            f"init_sharded on {name} {bad!r:.9}",
            lambda bad=bad: jaxtp.init_sharded(lambda: TREE, TX, bad),
            "TP010",
        )
        yield (
            f"jit_step on {name} {bad!r:.9}",
            lambda bad=bad: jaxtp.jit_step(lambda s, b: s, TREE, bad),
            "TP010",
        )
        yield (
            f"verify on {name} {bad!r:.9}",
            lambda bad=bad: jaxtp.verify(loss, TREE, (X,), bad),
            ("TP010"),
        )
        yield f"batch on {name} {bad!r:.9}", lambda bad=bad: jaxtp.shard_batch(X, bad), "TP010"
    for bad in NO_SIZE:
        if bad == -1:
            continue
        for axis in ("tp", "dp", "ep"):
            yield (
                f"make_mesh {axis}={bad!r}",
                lambda axis=axis, bad=bad: jaxtp.make_mesh(**{"tp": 1, axis: bad}),
                "TP010",
            )
    for bad in ({"tq": 2}, {"model": 2}, {"TP": 2}):
        yield f"make_mesh {bad}", lambda bad=bad: jaxtp.make_mesh(tp=2, **bad), "TP010"
    for bad in (8, 2.5, ANYTHING):
        yield f"devices {bad!r}", lambda bad=bad: jaxtp.make_mesh(tp=2, devices=bad), "TP010"
    for bad in ([0, 1], ["cpu:0"], np.array(jax.devices()).reshape(2, 4)):
        yield f"devices {bad!r:.9}", lambda bad=bad: jaxtp.make_mesh(tp=2, devices=bad), "TP010"
    yield "no devices", lambda: jaxtp.make_mesh(tp=2, devices=[]), "TP010"
    yield "two open sizes", lambda: jaxtp.make_mesh(tp=-1, dp=-1), "TP010"
    yield "too many devices", lambda: jaxtp.make_mesh(tp=64), "TP010"
    yield "idle devices", lambda: jaxtp.make_mesh(tp=2), "TP011"
    for bad in NO_MAPPING:
        if bad:
            yield f"axis_names {bad!r:.12}", lambda bad=bad: plan(axis_names=bad), "TP010"
            yield f"overrides {bad!r:.12}", lambda bad=bad: plan(overrides=bad), "TP020"
        yield (
            f"state_overrides {bad!r:.12}",
            lambda bad=bad: jaxtp.state_specs(TREE, plan(), state_overrides=bad),
            "TP044",
        )
    for bad in ({"tp": "tp", "dp": "tp"}, {"tp": "nope"}, {"tensor": "tp"}, {"tp": 4}, {4: "tp"}):
        yield f"axis_names {bad}", lambda bad=bad: plan(axis_names=bad), "TP010"
    yield "no tensor axis", lambda: plan(sizes={"data": 2, "model": 4}), "TP013"
    for bad in NO_SPEC:
        yield f"override {bad!r:.30}", lambda bad=bad: plan(overrides={"up": bad}), "TP044"
        yield (
            f"state override {bad!r:.30}",
            lambda bad=bad: jaxtp.state_specs(TREE, plan(), state_overrides={"up": bad}),
            "TP044",
        )
    yield (
        "a sharding as override",
        lambda: plan(overrides={"up": NamedSharding(mesh(), P(None, "tp"))}),
        "TP044",
    )
    for pattern in ("(", "[", "*", 4, None, b"up"):
        yield f"pattern {pattern!r}", lambda p=pattern: plan(overrides={p: P()}), "TP044"
    yield "override of nothing", lambda: plan(overrides={"nothing": P()}), "TP040"
    yield (
        "override that does not divide",
        (lambda: plan({"w": np.ones((6, 6))}, overrides={"w": P("tp")})),
        "TP003",
    )
    for name in ("heads", "kv_heads", "head_dim"):
        for bad in NO_COUNT:
            yield f"{name}={bad!r:.12}", lambda n=name, b=bad: plan(QKVO, **{n: b}), "TP020"
        yield f"{name}=-8", lambda n=name: plan(QKVO, **{n: -8}), "TP003"
    yield "heads over kv heads", lambda: plan(QKVO, heads=8, kv_heads=3), "TP003"
    for bad in ("config.json", b"config.json", 8, 2.5, [8], (8,), {8}, len, dict, re):
        yield f"config={getattr(bad, '__name__', bad)!r}", lambda bad=bad: plan(config=bad), "TP020"
    for bad in ("8", 8.0, NAN, "eight"):
        for key in ("num_attention_heads", "hidden_size", "vocab_size", "num_key_value_heads"):
            yield f"config {key}={bad!r}", lambda k=key, b=bad: plan(config={k: b}), "TP020"
    for bad in (2, "2", [2], {"layers": 2}, True):
        yield f"stages={bad!r}", lambda bad=bad: plan(stages=bad), "TP074"
    yield "stages without a stack", lambda: plan(sizes={"pp": 2, "tp": 2}), "TP074"
    yield (
        "stages of another mesh",
        lambda: plan(stages=Stages.even(4, 2, micro_batches=2)),
        "TP074",
    )
    for bad in (NAN, INF, -1, 1.5, "0.1", True):
        yield f"budget {bad!r}", lambda bad=bad: plan(replicated_budget=bad), "TP020"
    for bad in ("pad", "", None, 4, "FACTOR"):
        yield f"policy {bad!r}", lambda bad=bad: plan(policy=bad), "TP020"
    for bad in (4, -1, "3", True, 2.5):
        yield f"zero {bad!r}", lambda bad=bad: plan(zero=bad), "TP020"
    for bad in NO_INPUTS:
        yield f"inputs {bad!r:.12}", lambda bad=bad: plan(fn=loss, inputs=bad), "TP046"
        yield (
            f"verify inputs {bad!r:.12}",
            lambda bad=bad: jaxtp.verify(loss, TREE, bad, mesh()),
            "TP046",
        )
    for bad in ("fn", 4, TREE, ANYTHING):
        yield f"fn {bad!r:.12}", lambda bad=bad: plan(fn=bad, inputs=(X,)), "TP046"
    yield "fn without inputs", lambda: plan(fn=loss), "TP046"
    yield "too few inputs", lambda: plan(fn=lambda p, x, y: x + y, inputs=(X,)), "TP046"
    yield "too many inputs", lambda: plan(fn=loss, inputs=(X, X, X)), "TP046"
    for what, bad in BAD_FN.items():
        yield f"fn that {what}", lambda bad=bad: plan(fn=bad, inputs=(X,)), "TP046"
    yield "inputs of another width", lambda: plan(fn=loss, inputs=(X[:, 1:],)), "TP046"
    yield "keys of two types", lambda: plan({1: X, "a": X}), "TP046"
    yield "inputs without fn", lambda: plan(inputs=(X,)), "TP046"
    yield "a Linen module without inputs", lambda: plan(fn=nn.Dense(4)), "TP046"
    for bad in NO_TREE:
        yield f"tree {bad!r:.14}", lambda bad=bad: plan(bad), "TP046"
        yield f"shard {bad!r:.14}", lambda bad=bad: jaxtp.shard(bad, mesh()), "TP046"
    for bad in NO_PLAN:
        yield f"plan {bad!r:.12}", lambda bad=bad: jaxtp.shard(TREE, mesh(), plan=bad), "TP045"
        yield f"unshard by {bad!r:.12}", lambda bad=bad: jaxtp.unshard(TREE, bad), "TP045"
        yield (
            f"jit_step by {bad!r:.12}",
            lambda bad=bad: jaxtp.jit_step(lambda s, b: s, TREE, mesh(), plan=bad),
            "TP045",
        )
        yield (
            f"init_sharded by {bad!r:.12}",
            lambda bad=bad: jaxtp.init_sharded(lambda: {"w": jnp.ones(4)}, TX, mesh(), plan=bad),
            "TP045",
        )
        yield f"parallelize by {bad!r:.12}", lambda bad=bad: jaxtp.parallelize(loss, bad), "TP045"
        yield f"rules of {bad!r:.12}", lambda bad=bad: jaxtp.export_rules(bad), "TP045"
        yield f"annotate by {bad!r:.12}", lambda bad=bad: jaxtp.annotate(TREE, bad), "TP045"
        yield f"state by {bad!r:.12}", lambda bad=bad: jaxtp.state_specs(TREE, bad), "TP045"
        yield f"diff with {bad!r:.12}", lambda bad=bad: plan().diff(bad), "TP045"
        yield f"save by {bad!r:.12}", lambda bad=bad: FOLDER.save(1, TREE, plan=bad), "TP045"
        yield f"use_plan {bad!r:.12}", lambda bad=bad: under(bad, mesh()), "TP045"
    for bad in (None, 4, "mesh", SIZES, ANYTHING):
        yield f"use_plan on {bad!r:.12}", lambda bad=bad: under(plan(), bad), "TP010"
    for bad in (None, 4, "fn", TREE, ANYTHING):
        yield f"parallelize {bad!r:.12}", lambda bad=bad: jaxtp.parallelize(bad, plan()), "TP046"
        yield f"padding of {bad!r:.12}", lambda bad=bad: jaxtp.mask_padding(bad, 8), "TP046"
        yield f"constrain {bad!r:.12}", lambda bad=bad: jaxtp.constrain(bad, "rows"), "TP046"
    for bad in NO_COUNT:
        yield f"vocabulary {bad!r:.12}", lambda bad=bad: jaxtp.mask_padding(X, bad), "TP003"
    for bad in (None, 4, ["hidden"], {}, "residual stream"):
        yield f"activation {bad!r:.12}", lambda bad=bad: jaxtp.constrain(X, bad), "TP072"
        if not isinstance(bad, str):
            yield f"path {bad!r}", lambda bad=bad: plan()[bad], "TP045"
    for bad in ("text", ANYTHING, len):
        yield (
            f"input {bad!r:.12} of parallelize",
            lambda bad=bad: jaxtp.parallelize(loss, plan())(TREE, bad),
            "TP046",
        )
    for bad in (None, 4, b"runs", [], {}, ANYTHING, "run\0"):
        yield f"folder {bad!r:.12}", lambda bad=bad: jaxtp.Checkpoints(bad), "TP132"
        yield f"load_hf {bad!r:.12}", lambda bad=bad: jaxtp.load_hf(bad, mesh()), "TP132"
        yield f"dump_tree to {bad!r:.12}", lambda bad=bad: jaxtp.dump_tree(TREE, bad), "TP132"
        yield f"page {bad!r:.12}", lambda bad=bad: jaxtp.see_tp_plan(plan(), bad), "TP132"
    for bad in ("/", "/nowhere/page"):
        yield f"page {bad}", lambda bad=bad: jaxtp.see_tp_plan(plan(), bad), "TP132"
    for bad in (None, 8, b"h100:1x8", {}, ANYTHING, "h100", "h100:8", "h999:1x8"):
        yield f"target {bad!r:.12}", lambda bad=bad: jaxtp.preflight(loss, target=bad), "TP116"
    for bad in (None, 8, TREE, ANYTHING):
        yield (
            f"preflight of {bad!r:.12}",
            lambda bad=bad: jaxtp.preflight(bad, target=H100),
            "TP133",
        )
    for bad in (0, -1, NAN, None, "60"):
        yield (
            f"time limit {bad!r}",
            lambda bad=bad: jaxtp.preflight(loss, target=H100, time_limit=bad),
            "TP110",
        )
    yield from of_search()
    yield from of_kinds()
    for bad in (None, 4, ANYTHING, TREE):
        yield f"quantize {bad!r:.12}", lambda bad=bad: jaxtp.models.quantize(bad, "int8"), "TP020"
    for bad in (5, b"adapter", [], "a\0"):
        yield (
            f"adapter {bad!r}",
            lambda bad=bad: jaxtp.load_hf(HF, mesh(), adapter=bad),
            "TP132",
        )
    for bad in (-1, NAN, INF, None, "60"):
        yield f"watchdog {bad!r}", lambda bad=bad: jaxtp.watchdog(bad), "TP020"
    for bad in (None, 4, "x", [], X):
        yield f"facts {bad!r:.12}", lambda bad=bad: jaxtp.agree(bad), "TP020"
    for bad in (None, 2.5, "x", [None], X):
        yield (
            f"static {bad!r:.12}",
            lambda bad=bad: jaxtp.jit_step(lambda s, b: s, placed(), mesh(), static_argnums=bad),
            "TP133",
        )
    for bad in (None, {}, [], ()):
        yield (
            f"a step of {bad!r}",
            lambda bad=bad: jaxtp.jit_step(lambda s, b: s, placed(), mesh())(bad, X),
            "TP045",
        )
    for bad in ("", "{}", "[]", "null", "not json", '{"format": 99}', '{"format": 1}'):
        yield f"plan text {bad}", lambda bad=bad: jaxtp.Plan.from_json(bad), "TP045"
    for bad, good in (
        ("down/kernel", "up/kernel"),
        ("NaN", "128"),
        ("-128", "128"),
        ("1.5", "128"),
    ):
        text = plan().to_json().replace(good, bad)
        yield f"{bad} for {good}", lambda text=text: jaxtp.Plan.from_json(text), "TP045"
    for bad in (None, 4, TREE):
        yield f"check {bad!r:.12}", lambda bad=bad: jaxtp.check(bad, must_fit=True), "TP115"
    for bad in ("nothing", "", "up"):
        yield f"explain {bad!r}", lambda bad=bad: plan().explain(bad), "TP045"
    yield "plan of another tree", lambda: jaxtp.shard({"x": X}, mesh(), plan=plan()), "TP045"
    yield "half of a tree", lambda: jaxtp.shard({"up": TREE["up"]}, mesh(), plan=plan()), "TP045"
    yield (
        "another shape",
        lambda: jaxtp.shard({**TREE, "up": {"kernel": np.ones((4, 4))}}, mesh(), plan=plan()),
        "TP045",
    )
    yield (
        "plan of another mesh",
        lambda: jaxtp.shard(TREE, mesh(), plan=plan(sizes={"dp": 4, "tp": 2})),
        "TP010",
    )
    yield "plan and options", lambda: jaxtp.shard(TREE, mesh(), plan=plan(), heads=8), "TP020"
    yield "a mesh of shapes", lambda: jaxtp.shard(TREE, AbstractMesh((8,), ("tp",))), "TP010"
    for bad in NO_TX:
        yield (
            f"optimizer {bad!r:.12}",
            lambda bad=bad: jaxtp.init_sharded(lambda: TREE, bad, mesh()),
            "TP046",
        )
    for bad in (TREE, 4, "init", None):
        yield f"init_fn {bad!r:.12}", lambda b=bad: jaxtp.init_sharded(b, TX, mesh()), "TP046"
    yield "init_fn of a key", lambda: jaxtp.init_sharded(lambda key: TREE, TX, mesh()), "TP046"
    yield "swapped", lambda: jaxtp.init_sharded(lambda: TREE, mesh(), TX), "TP046"
    yield "mesh first", lambda: jaxtp.make_plan(SIZES, TREE), "TP010"
    yield "shard(mesh, tree)", lambda: jaxtp.shard(mesh(), TREE), "TP010"
    for bad in ("step", 4, TREE, None):
        yield f"step {bad!r:.12}", lambda b=bad: jaxtp.jit_step(b, TREE, mesh()), "TP133"
    yield "a state on the host", lambda: jaxtp.jit_step(lambda s, b: s, TREE, mesh()), "TP070"
    yield "parameters on the host", lambda: jaxtp.init_optimizer(TX, TREE), "TP070"
    for bad in (np.ones((3, 2)), {"x": np.ones((5, 2))}):
        yield f"batch of {bad!r:.14}", lambda b=bad: jaxtp.shard_batch(b, mesh()), "TP003"
    for bad in ("text", {"x": "text"}, {"x": ANYTHING}):
        yield f"batch {bad!r:.14}", lambda b=bad: jaxtp.shard_batch(b, mesh()), "TP046"
    yield (
        "text in a batch",
        lambda: jaxtp.shard_batch({"x": np.ones((8, 2)), "name": np.array(["a"] * 8)}, mesh()),
        "TP046",
    )
    for bad in ((None, 4), (2.5, "tp"), (None, "tp", None)):
        yield (
            f"an annotation {bad}",
            lambda b=bad: plan({"k": nn.Partitioned(jnp.ones((32, 64)), b)}),
            "TP044",
        )
    yield (
        "a step on another mesh",
        lambda: jaxtp.jit_step(lambda s, b: s, placed(), jaxtp.make_mesh(tp=2, dp=4)),
        "TP010",
    )
    yield (
        "a step with another model's plan",
        lambda: jaxtp.jit_step(lambda s, b: s, placed(), mesh(), plan=plan(QKVO)),
        "TP045",
    )
    yield (
        "text among the metrics",
        lambda: jaxtp.jit_step(lambda s, b: (s, {"a": "x"}), placed(), mesh())(placed(), X),
        "TP133",
    )
    for bad in (0, -1, 2.5, "3", None):
        yield f"keep_last={bad!r}", lambda b=bad: jaxtp.Checkpoints("a", keep_last=b), "TP020"
    for bad in ([1], {1: 2}, {"a": [{2: 3}]}, {"a": ({2: 3},)}):
        yield f"extra={bad!r}", lambda b=bad: FOLDER.save(1, TREE, extra=b), "TP090"
    yield "an empty state", lambda: FOLDER.save(1, {}), "TP090"
    yield (
        "a state of structs",
        lambda: FOLDER.save(1, {"a": jax.ShapeDtypeStruct((3,), "float32")}),
        "TP090",
    )
    yield "text in a state", lambda: FOLDER.save(1, {"a": "x"}), "TP046"
    yield "a donated state", lambda: FOLDER.save(1, donated()), "TP133"
    yield "donated parameters", lambda: jaxtp.shard(donated(), mesh()), "TP133"
    yield "donated, to the host", lambda: jaxtp.unshard(donated()), "TP133"
    yield "no such step", lambda: FOLDER.restore(TREE, step=4), "TP090"
    yield "too few logits", lambda: jaxtp.mask_padding(jnp.ones((2, 4)), 5), "TP003"
    yield (
        "vocabulary that nobody masks",
        lambda: plan(
            {
                "embed": {"embedding": np.ones((1001, 64))},
                "lm_head": {"kernel": np.ones((64, 1001))},
            },
            pad_vocab=True,
        ),
        "TP020",
    )
    yield "nothing on tp", lambda: plan(QKVO, strict=True), "TP042"
    yield "an axis that does nothing", lambda: plan(sizes={"x": 2, "tp": 4}, strict=True), "TP011"
    for bad in ("no-such-file.json", "/proc/nope"):
        yield f"tree file {bad}", lambda b=bad: jaxtp.load_tree(b), "TP132"


def endless():
    """Trees that hold themselves, and one deeper than Python goes."""
    tree, rows, deep = {"w": X}, [X], {}
    tree["self"] = rows
    rows.append(tree)
    for _ in range(5000):
        deep = {"a": deep}
    return {"a dict in itself": tree, "a list in itself": rows, "5,000 dicts": deep}


def a_step(**given):
    return jaxtp.jit_step(lambda s, b: s, placed(), mesh(), **given)


def a_decode(decode=loss, plan=None, **given):
    jaxtp.jit_decode(decode, globals()["plan"]() if plan is None else plan, mesh(), **given)


def an_init(**given):
    return jaxtp.init_sharded(lambda: TREE, TX, mesh(), **given)


def layers(stack):
    given = {"body": lambda x, layer, context: x, "x_BTD": np.ones((2, 4, 32)), "params": stack}
    return lambda **changed: jaxtp.scan_layers(**{**given, **changed})


def a_verify(fn=loss, params=TREE, **given):
    return jaxtp.verify(fn, params, (X,), mesh(), **given)


def a_parallel(**given):
    return jaxtp.parallelize(loss, plan(), **given)


def parallel_on(params):
    return jaxtp.parallelize(loss, plan(), mesh())(params, X)


def parallel_inside(axes):
    """Called where every device has its own shard along these axes."""
    run = jaxtp.parallelize(loss, plan())
    mapped = jax.shard_map(
        run, mesh=mesh(), in_specs=(P(), P()), out_specs=P(), axis_names=axes, check_vma=False
    )
    return jax.jit(mapped)(TREE, X)


def a_preflight(**given):
    return jaxtp.preflight(loss, target=H100, **given)


def constrained(units):
    return jaxtp.constrain(X, "hidden", units)


def a_page(**given):
    return jaxtp.see_tp_plan(plan(), **given)


def a_dump(config):
    return jaxtp.dump_tree(TREE, "never", config)


def a_load(**given):
    return jaxtp.load_hf(HF, mesh(), **given)


def a_restore(**given):
    return FOLDER.restore(TREE, **given)


def an_answer(**given):
    asked = {"model": jaxtp.models.abstract("llama-tiny"), "prompts": [[1]], **given}
    return jaxtp.generate(**asked)


def a_watchdog(seconds=60, **given):
    return jaxtp.watchdog(seconds, **given)


def search(run="llama-tiny", **asked):
    return jaxtp.search(run, **{"batch": 8, "compile_best": 0, **asked})


def of_search():
    """The same for the search for a mesh, of presets and of models that a function returns."""
    for bad in NO_RUN:
        yield f"a search for {bad!r:.12}", lambda bad=bad: search(bad), "TP132"
    for name in ("batch", "seq", "limit", "compile_best"):
        for bad in (-5, "8", 2.5, None, True, [8]):
            yield f"search {name}={bad!r}", lambda n=name, b=bad: search(**{n: b}), "TP132"
    yield "a table without rows", lambda: search(limit=0), "TP132"
    yield "a batch of a function", lambda: search(lambda: (loss, TREE, (X,)), batch="8"), "TP132"
    for bad in (-1, NAN, INF, None, "100gbps"):
        yield f"search network={bad!r}", lambda bad=bad: search(network=bad), "TP132"
    for bad in (["mesh.tp"], "mesh.tp", 4, [], {4: 2}, {"mesh.tp": None}):
        yield f"search fixed={bad!r}", lambda bad=bad: search(fixed=bad), "TP132"
    for i, bad in enumerate(NO_MODEL):
        yield f"no model {i}", lambda bad=bad: search(bad), "TP132"
    for bad in ("text", ANYTHING, len):
        yield f"input {bad!r:.12}", lambda bad=bad: search(lambda: (loss, TREE, (X, bad))), "TP046"
    for bad in (None, {}, {"up": "text"}):
        yield f"a model of {bad!r}", lambda bad=bad: search(lambda: (loss, bad, (X,))), "TP046"


def of_kinds():
    """Arguments of another kind than a public function takes, each in a call that is else right."""
    text_tree = {"a": {"b": "x"}}
    stack = {"kernel": np.ones((3, 32, 32))}
    calls = [
        ("shard_batch", lambda **k: jaxtp.shard_batch(X, mesh(), **k), "local", NO_FLAG, "TP020"),
        ("jit_step", a_step, "donate", NO_FLAG, "TP020"),
        ("jit_step", a_step, "compiler_options", NO_OPTIONS, "TP110"),
        ("jit_step", a_step, "static_argnums", [-1, True, 1.0], "TP133"),
        ("jit_decode", a_decode, "decode", NO_FUNCTION, "TP133"),
        ("jit_decode", a_decode, "plan", NO_PLAN, "TP045"),
        ("jit_decode", a_decode, "donate", NO_FLAG, "TP020"),
        ("jit_decode", a_decode, "compiler_options", NO_OPTIONS, "TP110"),
        ("init_optimizer", lambda tx: jaxtp.init_optimizer(tx, placed()), "tx", NO_TX, "TP046"),
        ("init_sharded", an_init, "apply_fn", NO_FUNCTION[1:], "TP020"),
        ("scan_layers", layers(stack), "body", NO_FUNCTION, "TP046"),
        ("scan_layers", layers(stack), "x_BTD", [None, 4, "x", TREE, np.ones(3)], "TP046"),
        ("scan_layers", layers(stack), "params", [None, 3, "x", {}, TREE, text_tree], "TP046"),
        ("scan_layers", layers(stack), "context", [4, "x", [1]], "TP020"),
        ("scan_layers", layers(stack), "remat", [None, 4, True], "TP020"),
        ("verify", a_verify, "gradients", NO_FLAG, "TP020"),
        ("verify", a_verify, "show", NO_FUNCTION, "TP020"),
        ("verify", a_verify, "plan", [None, SIZES], "TP020"),
        ("verify", a_verify, "heds", [8], "TP020"),
        ("verify", a_verify, "params", [jax.eval_shape(lambda: TREE), text_tree], "TP046"),
        ("shard", lambda **k: jaxtp.shard(TREE, mesh(), **k), "heds", [8], "TP020"),
        ("parallelize", a_parallel, "overlap", [None, True, 4, "off", ["auto"]], "TP110"),
        ("parallelize", a_parallel, "mesh", ["tp", 4, SIZES, ANYTHING], "TP010"),
        ("parallelize", parallel_on, "params", [jax.eval_shape(lambda: TREE), text_tree], "TP046"),
        ("parallelize", parallel_inside, "axes", [{"tp"}, {"dp"}], "TP010"),
        ("preflight", a_preflight, "args", [X, "x", 4, {"x": X}], "TP133"),
        ("preflight", a_preflight, "mesh", ["tp", 4, [2]], "TP010"),
        ("preflight", a_preflight, "options", [4, "off", {}], "TP110"),
        ("preflight", a_preflight, "keywords", ["x", 4, [1]], "TP020"),
        ("preflight", a_preflight, "tensor_axes", ["tp", 4, [2]], "TP020"),
        ("preflight", a_preflight, "floor_bytes", [*NO_NUMBER, -1], "TP020"),
        ("preflight", a_preflight, "model_flops", [*NO_NUMBER, -1], "TP020"),
        ("preflight", a_preflight, "idle_share", [*NO_NUMBER, None, 1.5], "TP020"),
        ("preflight", a_preflight, "needs", [4, "x", [4]], "TP020"),
        ("preflight", a_preflight, "on_progress", NO_FUNCTION, "TP020"),
        ("compile_options", jaxtp.compile_options, "overlap", [None, True, 4, ["auto"]], "TP110"),
        ("compile_options", jaxtp.compile_options, "extra", NO_OPTIONS, "TP110"),
        (
            "compile_options",
            jaxtp.compile_options,
            "gradient_fusion",
            [None, "1", 1.5, -1, NAN, [1]],
            "TP110",
        ),
        ("check", lambda **k: jaxtp.check(None, **k), "max_ratio", [*NO_NUMBER, -1], "TP020"),
        ("check", lambda **k: jaxtp.check(None, **k), "max_peak_bytes", NO_NUMBER, "TP020"),
        ("check", lambda **k: jaxtp.check(None, **k), "min_hidden_share", [*NO_NUMBER, 2], "TP020"),
        ("check", lambda **k: jaxtp.check(None, **k), "must_fit", NO_FLAG, "TP020"),
        ("make_plan", plan, "pad_vocab", [None, "yes", 1, 0, [True]], "TP020"),
        ("make_plan", plan, "strict", NO_FLAG, "TP020"),
        ("MeshShape", jaxtp.MeshShape, "sizes", NO_SHAPE, "TP010"),
        ("MeshShape", jaxtp.MeshShape.of, "mesh", NO_MESH, "TP010"),
        ("MeshShape", jaxtp.MeshShape.from_data, "data", [None, 4, "x", {}, []], "TP010"),
        ("plan_mesh", lambda shape: jaxtp.plan_mesh(mesh(), shape), "shape", NO_MESH, "TP010"),
        ("constrain", constrained, "units", ["88", 8, [0], [2.5], ["8"], [NAN]], "TP003"),
        ("watchdog", a_watchdog, "seconds", [True, [1]], "TP020"),
        ("watchdog", a_watchdog, "mesh", ["tp", 4, SIZES], "TP010"),
        ("watchdog", a_watchdog, "first_step", [None, -1, 2.5, "1"], "TP020"),
        ("watchdog", a_watchdog, "place", [None, 4, []], "TP020"),
        ("probe", jaxtp.probe, "size", ["8", 0, -8, 2.5, NAN, True], "TP020"),
        ("probe", jaxtp.probe, "slow_ratio", [*NO_NUMBER, 0, -1], "TP020"),
        ("probe", jaxtp.probe, "timeout", [*NO_NUMBER, None, 0, -1], "TP020"),
        ("probe", jaxtp.probe, "tamper", NO_FUNCTION[1:], "TP020"),
        ("agree", lambda **k: jaxtp.agree({}, **k), "timeout", [*NO_NUMBER, None, 0], "TP020"),
        ("see_tp_plan", a_page, "report", [4, "x"], "TP020"),
        ("see_tp_plan", a_page, "mesh", [SIZES], "TP020"),
        ("see_tp_plan", a_page, "heads", [8], "TP020"),
        ("dump_tree", a_dump, "config", [4, "x", [1], {"a": ANYTHING}, {"a": {1, 2}}], "TP132"),
        ("search", search, "time_limit", [*NO_NUMBER, None, 0], "TP132"),
        ("search", search, "on_progress", NO_FUNCTION, "TP132"),
        ("search", search, "target", [None, 4, ["h100:1x8"]], "TP132"),
        ("generate", an_answer, "model", [None, 4, "llama", TREE], "TP020"),
        ("generate", an_answer, "key", [4, "x", np.ones(2), np.ones((2, 2), np.uint32)], "TP020"),
        ("load_hf", a_load, "plan", [4, "x", SIZES], "TP045"),
        ("load_hf", a_load, "remat", [None, True, "all", [], np.ones(2)], "TP020"),
        ("load_hf", a_load, "attention_implementation", [None, "flash", np.ones(2)], "TP020"),
        ("load_hf", a_load, "quantize", [None, 8, "int2", np.ones(2)], "TP020"),
        ("load_hf", a_load, "progress", [None, 1, "no", np.ones(2)], "TP020"),
        ("restore", a_restore, "plan", [4, "x", SIZES], "TP045"),
        ("restore", a_restore, "step", ["1", 1.0, True, np.ones(2)], "TP090"),
        ("restore", a_restore, "state_overrides", [4, "x", ["ema"]], "TP020"),
        ("make_plan", lambda leaf: plan({**TREE, "n": leaf}), "leaf", [2**70, -(2**70)], "TP046"),
    ]  # fmt: skip
    for name, call, argument, values, code in calls:
        for bad in values:
            yield (
                f"{name} {argument}={bad!r:.24}",
                lambda call=call, argument=argument, bad=bad: call(**{argument: bad}),
                code,
            )
    for key in ("num_attention_heads", "hidden_size", "vocab_size", "num_key_value_heads"):
        for bad in ([8], {"a": 8}, True, ANYTHING):
            yield f"config {key}={bad!r:.12}", lambda k=key, b=bad: plan(config={k: b}), "TP020"
    for what, bad in BAD_FN.items():
        yield f"verify fn that {what}", lambda bad=bad: a_verify(bad), "TP046"
    for what, bad in endless().items():
        yield f"plan of {what}", lambda b=bad: plan(b), "TP046"
        yield f"shard {what}", lambda b=bad: jaxtp.shard(b, mesh()), "TP046"
        yield f"batch of {what}", lambda b=bad: jaxtp.shard_batch(b, mesh()), "TP046"


# Without addresses of objects: names are the same in every process.
ROWS = {re.sub(r" at 0x\w*", "", what): (call, code) for what, call, code in table()}


@pytest.mark.parametrize("what", ROWS)
def test_bad_input_is_coded(what):
    call, code = ROWS[what]
    with pytest.raises(jaxtp.JaxtpError) as caught:
        call()
    assert caught.value.code == code, caught.value
    assert caught.value.fix


def test_the_table_is_large():
    assert len(ROWS) >= 1000
