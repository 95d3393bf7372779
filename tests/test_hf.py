"""Hugging Face folders: logits of every family, exact bytes in and out, refusals by name.

The fixtures are tiny random checkpoints made by `transformers`, with its logits; see
`scripts/make_hf_fixtures.py`, which also proved that `transformers` computes the same logits from
the files that `save_hf` writes.
"""

import dataclasses
import gc
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxtp
from jaxtp.activations.by_name import use_plan
from jaxtp.errors import (
    BadCheckpoint,
    BadConfig,
    BadWeights,
    PlanMismatch,
    SizeMismatch,
    UnsupportedModel,
)
from jaxtp.io import assemble
from jaxtp.io.hf import load_hf, save_hf
from jaxtp.io.hf.config import read_fields, runtime_of, write_fields
from jaxtp.io.hf.files import read_folder
from jaxtp.io.safetensors import read_box, read_header, write_file, write_order
from jaxtp.mesh.build import make_mesh, plan_mesh
from jaxtp.models import PRESETS, LlamaConfig
from jaxtp.models.registry import FAMILIES

FIXTURES = Path(__file__).parent / "fixtures" / "hf"
# 99 tokens divide by no tensor-parallel size: the vocabulary is replicated on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:TP043")
SEVERAL_FILES = {"qwen2"}
FLOAT32 = {"param_dtype": "float32", "dtype": "float32"}


@nnx.jit
def run(model, tokens):
    return model(tokens)


def mesh_of(tp):
    return make_mesh(tp=tp, devices=jax.devices()[:tp])


def load(folder, mesh=None, **options):
    return load_hf(folder, mesh or mesh_of(8), progress=False, **options)


def arrays_of(folder):
    """Every tensor of a folder as a NumPy array."""
    found = {}
    for name, tensor in read_folder(folder).items():
        found[name] = np.empty(tensor.shape, jnp.dtype(tensor.dtype))
        read_box(tensor, tensor.shape, tuple((0, n) for n in tensor.shape), found[name])
    return found


def write(file, arrays):
    tensors = {name: (str(a.dtype), a.shape) for name, a in arrays.items()}
    write_file(file, tensors, (arrays[name] for name in write_order(tensors)))


@pytest.fixture
def copy(tmp_path):
    """Makes a copy of a fixture, with other weights or config fields if given."""

    def make(family, change=None, **fields):
        folder = tmp_path / f"{family}-copy"
        shutil.copytree(FIXTURES / family, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | fields))
        if change is not None:
            arrays = arrays_of(folder)
            change(arrays)
            write(folder / "model.safetensors", arrays)
        return folder

    return make


# ---- logits ------------------------------------------------------------------------------------


# The other sizes of tp: by the log-probabilities of tests/legs/test_generate_meshes.py.
TP_OF = {
    "llama": 2, "mistral": 4, "qwen2": 8, "qwen3": 1, "gemma": 8, "gemma2": 2, "gemma3_text": 4,
    "phi3": 8, "olmo2": 2, "smollm3": 4, "mixtral": 8, "qwen3_moe": 4, "gpt2": 4,
    "deepseek_v2": 2, "deepseek_v3": 8, "gpt_oss": 4,
}  # fmt: skip


@pytest.mark.parametrize(("family", "tp"), [(family, TP_OF[family]) for family in FAMILIES])
def test_logits_equal_those_of_transformers(family, tp):
    expected = np.load(FIXTURES / family / "expected.npz")
    mesh = mesh_of(tp)
    model, _ = load(FIXTURES / family, mesh, pad_vocab=True, **FLOAT32)
    plan = jaxtp.make_plan(model, mesh, config=model.config)
    with use_plan(plan, plan_mesh(mesh, plan.mesh)):
        logits = run(model, jnp.asarray(expected["tokens"], jnp.int32))
    assert len(logits.sharding.device_set) == tp
    np.testing.assert_allclose(logits[..., :99], expected["logits"], atol=1e-5)
    assert np.abs(expected["logits"]).max() > 3  # else the tolerance would mean little


@pytest.mark.parametrize("family", ["gemma3_text", "smollm3"])
def test_layers_that_differ_keep_their_kind_in_stages(family):
    expected = np.load(FIXTURES / family / "expected.npz")
    mesh = make_mesh(pp=3, tp=2, devices=jax.devices()[:6])
    model, _ = load(FIXTURES / family, mesh, **FLOAT32)
    plan = jaxtp.make_plan(model, mesh, config=model.config)
    tokens = jnp.tile(jnp.asarray(expected["tokens"], jnp.int32), (3, 1))
    with use_plan(plan, plan_mesh(mesh, plan.mesh)):
        logits = run(model, tokens)
    np.testing.assert_allclose(logits, np.tile(expected["logits"], (3, 1, 1)), atol=1e-5)


def test_layers_without_experts_are_in_front_of_the_stages():
    expected = np.load(FIXTURES / "deepseek_v3" / "expected.npz")
    mesh = make_mesh(pp=2, tp=2, devices=jax.devices()[:4])
    model, _ = load(FIXTURES / "deepseek_v3", mesh, **FLOAT32)
    plan = jaxtp.make_plan(model, mesh, config=model.config)
    assert plan.stages.layers == ((1, 1),)
    assert plan["layers/self_attn/kv_b_proj/kernel"].spec == (("pp",), (), ("tp",), ())
    assert plan["dense_layers/self_attn/kv_b_proj/kernel"].spec == ((), (), ("tp",), ())
    assert plan["dense_layers/self_attn/kv_a_proj_with_mqa/kernel"].role == "low_rank"
    tokens = jnp.tile(jnp.asarray(expected["tokens"], jnp.int32), (2, 1))
    with use_plan(plan, plan_mesh(mesh, plan.mesh)):
        logits = run(model, tokens)
    np.testing.assert_allclose(logits, np.tile(expected["logits"], (2, 1, 1)), atol=1e-5)


def test_attention_is_split_as_far_as_its_heads_allow():
    model, _ = load(FIXTURES / "llama")  # 8 query heads, 2 kv heads, 99 tokens
    attention = model.layers.self_attn
    assert attention.q_proj.kernel[...].sharding.shard_shape((3, 32, 8, 8)) == (3, 32, 1, 8)
    assert attention.k_proj.kernel[...].sharding.shard_shape((3, 32, 2, 8)) == (3, 32, 1, 8)
    assert model.lm_head.kernel[...].sharding.is_fully_replicated


def test_types_are_those_of_the_file_unless_asked():
    model, params = load(FIXTURES / "qwen2")
    assert model.config.dtype == model.config.param_dtype == "bfloat16"
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    wider, _ = load(FIXTURES / "qwen2", param_dtype="float32")
    assert wider.config.dtype == "bfloat16"
    table, want = wider.embed_tokens.embedding[...], model.embed_tokens.embedding[...]
    assert table.dtype == jnp.float32
    np.testing.assert_array_equal(table, want.astype(jnp.float32))


def test_params_are_the_arrays_of_the_model():
    model, params = load(FIXTURES / "gemma")
    assert isinstance(params, nnx.State)
    merged = nnx.merge(nnx.graphdef(model), params)
    for a, b in zip(*map(jax.tree.leaves, (merged, model)), strict=True):
        assert a is b


def test_loaded_arrays_can_be_donated():
    _, params = load(FIXTURES / "llama")
    donated = jax.jit(lambda params: jax.tree.map(lambda x: x + 1, params), donate_argnums=0)
    donated(params)  # a buffer that cannot be donated is a warning, and those are errors here
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(params))


# ---- bytes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_bytes", [0, 4000, 2**30])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_layers_are_put_together_alike_from_any_chunks(family, chunk_bytes, monkeypatch):
    _, want = load(FIXTURES / family, mesh_of(1))
    monkeypatch.setattr(assemble, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(assemble, "PIECE_BYTES", 1000)
    _, got = load(FIXTURES / family)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("chunk_bytes", [0, 2**30])
def test_stages_hold_their_own_layers(chunk_bytes, monkeypatch):
    _, want = load(FIXTURES / "llama", mesh_of(1))
    monkeypatch.setattr(assemble, "CHUNK_BYTES", chunk_bytes)
    mesh = make_mesh(pp=3, tp=2, devices=jax.devices()[:6])
    overrides = {r"mlp/(gate|up)_proj": P("pp", None, "tp"), r"layers/.*norm": P("pp")}
    _, got = load(FIXTURES / "llama", mesh, overrides=overrides)
    gate = got["layers"]["mlp"]["gate_proj"]["kernel"][...]
    assert gate.sharding.shard_shape(gate.shape) == (1, 32, 24)
    jax.tree.map(np.testing.assert_array_equal, got, want)


class Places:
    """A sharding of which only the places of this process's devices matter."""

    def __init__(self, *spans):
        self.spans = spans

    def addressable_devices_indices_map(self, shape):
        whole = slice(None)
        return {i: (whole, slice(*span), whole) for i, span in enumerate(self.spans)}


@pytest.mark.parametrize(
    ("spans", "boxes"),
    [
        ([(0, 2), (2, 4), (0, 2)], [(0, 4)]),  # a replica is read once
        ([(4, 6), (2, 4)], [(2, 6)]),
        ([(0, 2), (6, 8)], [(0, 2), (6, 8)]),  # ranks of another process lie between
    ],
)
def test_what_a_process_reads_has_no_gaps(spans, boxes):
    found = assemble.local_boxes(Places(*spans), (3, 8, 5))
    assert found == [((0, 3), span, (0, 5)) for span in boxes]


def test_one_process_reads_every_weight_once(monkeypatch):
    read, real = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda *a: read.append(real(*a)) or read[-1])
    load(FIXTURES / "llama", mesh_of(8))
    stored = read_header(FIXTURES / "llama" / "model.safetensors").values()
    assert sum(read) == sum(tensor.num_bytes for tensor in stored)


def test_two_processes_read_their_shards_and_save_one_folder(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    script = Path(__file__).parent / "hf_processes.py"
    processes = [
        subprocess.Popen(
            [sys.executable, script, FIXTURES / "llama", tmp_path / "out", str(i), port],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(Path(jaxtp.__file__).parent.parent)},
        )
        for i in range(2)
    ]
    results = [process.communicate(timeout=200)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    stored = read_header(FIXTURES / "llama" / "model.safetensors").values()
    whole = sum(tensor.num_bytes for tensor in stored)
    for result in results:
        read, held, error = json.loads(result.splitlines()[-1])
        padding = 4 * (104 - 99) * 32 * 2  # of embedding and head; on the second process
        assert held - padding <= read <= held
        assert read < 0.7 * whole
        assert error < 1e-5
    same = (tmp_path / "out" / "model.safetensors", FIXTURES / "llama" / "model.safetensors")
    assert same[0].read_bytes() == same[1].read_bytes()


def test_the_benchmark_runs():
    script = Path(__file__).parent.parent / "scripts" / "bench_load.py"
    command = [sys.executable, script, "--gigabytes", "0.1", "--processes", "1", "--json"]
    environment = os.environ | {"PYTHONPATH": str(script.parent.parent)}
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    result = json.loads(run.stdout)
    (row,) = result["loads"]
    assert 0 < result["file_bytes"] - row["shard_bytes"] < 10_000  # the header
    assert (
        row["shard_bytes"] <= row["read_bytes"] < 1.1 * row["shard_bytes"]
    )  # imports are read too


# ---- saving ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_files_are_those_that_transformers_was_checked_with(family, tmp_path):
    source, saved = FIXTURES / family, tmp_path / "saved"
    model, _ = load(source, pad_vocab=True)
    save_hf(model, saved, progress=False, file_bytes=40_000 if family in SEVERAL_FILES else 10**9)
    assert json.loads((saved / "config.json").read_text()) == json.loads(
        (source / "saved_config.json").read_text()
    )
    if family not in SEVERAL_FILES:
        weights = "model.safetensors"
        assert (saved / weights).read_bytes() == (source / weights).read_bytes()
        assert sorted(p.name for p in saved.iterdir()) == ["config.json", weights]
        return
    want, got = arrays_of(source), arrays_of(saved)
    assert want.keys() == got.keys()
    for name in want:
        np.testing.assert_array_equal(got[name], want[name])
    index = json.loads((saved / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": sum(a.nbytes for a in want.values())}
    assert len(set(index["weight_map"].values())) > 2


def test_parameters_are_saved_from_the_host_and_apart_from_their_model(tmp_path):
    model, params = load(FIXTURES / "mixtral")
    save_hf(jaxtp.unshard(params), tmp_path / "host", config=model.config, progress=False)
    save_hf(params, tmp_path / "placed", config=model.config, progress=False)
    want = (FIXTURES / "mixtral" / "model.safetensors").read_bytes()
    for name in ("host", "placed"):
        assert (tmp_path / name / "model.safetensors").read_bytes() == want


def test_what_changes_no_logits_is_carried_over(copy, tmp_path):
    source = copy("mistral")
    (source / "tokenizer.json").write_text("{}")
    (source / "pytorch_model.bin").write_text("old")
    model, _ = load(source)
    save_hf(model, tmp_path / "saved", like=source, progress=False)
    names = {file.name for file in (tmp_path / "saved").iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    original = json.loads((source / "config.json").read_text())
    assert saved.pop("torch_dtype") == original.pop("dtype")
    assert saved == original | {"rope_scaling": None}
    with pytest.raises(BadConfig, match="another model") as error:
        save_hf(model, tmp_path / "other", like=FIXTURES / "llama", progress=False)
    assert error.value.where == str(FIXTURES / "llama" / "config.json")


def test_saving_refuses_what_it_cannot_do(tmp_path):
    model, params = load(FIXTURES / "llama")
    with pytest.raises(BadCheckpoint, match="the folder exists"):
        save_hf(model, tmp_path, progress=False)
    with pytest.raises(BadConfig, match=r"TP020 at config: parameters alone .*"):
        save_hf(params, tmp_path / "x", progress=False)
    del params["norm"]
    with pytest.raises(PlanMismatch, match=r"only the config or only .*: norm/scale"):
        save_hf(params, tmp_path / "x", config=model.config, progress=False)
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError("no space left")

    model, _ = load(FIXTURES / "llama")
    (tmp_path / "saved.unfinished").mkdir()  # of a process that was killed
    monkeypatch.setattr("jaxtp.io.hf.save.write_index", full)
    with pytest.raises(OSError, match="no space left"):
        save_hf(model, tmp_path / "saved", progress=False)
    assert list(tmp_path.iterdir()) == []


def test_progress_is_shown_on_stderr(tmp_path, capsys):
    model, _ = load_hf(FIXTURES / "llama", mesh_of(8))
    shown = capsys.readouterr()
    assert "loading llama" in shown.err
    assert shown.out == ""
    save_hf(model, tmp_path / "x", progress=False)
    assert capsys.readouterr().err == ""


# ---- damaged checkpoints -----------------------------------------------------------------------

Q = "model.layers.1.self_attn.q_proj.weight"


def replaced(name, value):
    def change(arrays):
        arrays[name] = value(arrays[name])

    return change


def with_nan(x):
    x[3, 5] = np.nan
    return x


DAMAGED = {
    "missing": (lambda a: a.pop(Q), rf"1 tensors are missing: {Q}"),
    "extra": (
        lambda a: a.update({"model.layers.3.foo.weight": np.zeros(3, np.float32)}),
        r"1 tensors are not of this model: model.layers.3.foo.weight",
    ),
    "another shape": (
        replaced(Q, lambda x: x[:-1]),
        rf"tensor '{Q}' has shape \[63, 32\], the config asks for \[64, 32\]",
    ),
    "transposed": (replaced(Q, lambda x: x.T), r"has shape \[32, 64\]"),
    "integers": (
        replaced(Q, lambda x: x.astype(np.int8)),
        rf"tensor '{Q}' is int8, which float32 cannot hold",
    ),
    "a wider type": (replaced(Q, lambda x: x.astype(np.float64)), "is float64, which float32"),
    "a layer of another type": (
        replaced(Q, lambda x: x.astype(np.float16)),
        rf"tensor '{Q}' is float16, 'model.layers.0.self_attn.q_proj.weight' is float32",
    ),
    "NaN": (replaced(Q, with_nan), rf"tensor '{Q}' holds infinities or NaN"),
}


@pytest.mark.parametrize(("change", "message"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_weights_are_named_and_leave_nothing(copy, change, message):
    folder = copy("llama", change)
    gc.freeze()  # what other tests left in cycles stays meanwhile
    try:
        alive = len(jax.live_arrays())
        with pytest.raises(BadWeights, match=message) as error:
            load(folder)
        assert error.value.code == "TP095"
        assert str(folder) in error.value.where
        del error
        gc.collect()
        assert len(jax.live_arrays()) == alive
    finally:
        gc.unfreeze()


def test_all_problems_of_a_checkpoint_are_listed_at_once(copy):
    def change(arrays):
        del arrays["model.norm.weight"]
        arrays[Q] = arrays[Q][:5]
        arrays["foo"] = np.zeros(1, np.float32)

    with pytest.raises(BadWeights, match=rf"(?s){Q}.*are missing: model.norm.*not of .* foo"):
        load(copy("llama", change))


def test_narrowing_weights_takes_an_explicit_type(copy):
    folder = copy("llama", dtype="bfloat16")
    with pytest.raises(BadWeights, match="is float32, which bfloat16 cannot hold"):
        load(folder)
    model, _ = load(folder, param_dtype="bfloat16")
    assert model.norm.scale[...].dtype == jnp.bfloat16
    with pytest.raises(BadWeights, match=r"TP095 at .*config.json: weights of type 'int4'"):
        load(copy("gpt2", dtype="int4"))


SHARD = "model-00002-of-00003.safetensors"


def edited_index(folder, edit):
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    edit(index["weight_map"])
    file.write_text(json.dumps(index))


def moved(weight_map):
    name = next(n for n, f in weight_map.items() if f == SHARD)
    weight_map[name] = "model-00003-of-00003.safetensors"


WRONG_INDEX = {
    "a file is missing": (lambda f: (f / SHARD).unlink(), f"{SHARD}: cannot be read: No such"),
    "a file is truncated": (lambda f: os.truncate(f / SHARD, 9000), f"{SHARD}: .*truncated"),
    "a tensor is elsewhere": (
        lambda f: edited_index(f, moved),
        rf"(?s){SHARD}: has what the index does not list.*00003-of-00003.safetensors: lacks what",
    ),
    "a path outside": (
        lambda f: edited_index(f, lambda m: m.update(x="../model.safetensors")),
        "index.json: tensor 'x' is in '../model.safetensors', which is no file of this folder",
    ),
    "no map": (
        lambda f: (f / "model.safetensors.index.json").write_text("{}"),
        "index.json: has no weight_map",
    ),
    "no JSON": (
        lambda f: (f / "model.safetensors.index.json").write_text("{"),
        "index.json: is no JSON",
    ),
    "no index": (
        lambda f: (f / "model.safetensors.index.json").unlink(),
        "no model.safetensors and no model.safetensors.index.json; the folder has config.json",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json: cannot be read: No such"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "is no JSON object"),
}


@pytest.mark.parametrize(("damage", "message"), WRONG_INDEX.values(), ids=WRONG_INDEX)
def test_wrong_folders_are_refused_by_file(copy, damage, message):
    folder = copy("qwen2")
    damage(folder)
    with pytest.raises(BadWeights, match=message):
        load(folder)


def test_older_gpt2_files_are_read(copy):
    """Published as saved from the model without its head: no prefix, masks among the weights."""

    def publish(arrays):
        for name in list(arrays):
            arrays[name.removeprefix("transformer.")] = arrays.pop(name)
        arrays["h.0.attn.bias"] = np.tril(np.ones((1, 1, 24, 24), np.float32))
        arrays["h.0.attn.masked_bias"] = np.float32(-1e4)
        arrays["lm_head.weight"] = arrays["wte.weight"]

    _, want = load(FIXTURES / "gpt2")
    _, got = load(copy("gpt2", publish))
    jax.tree.map(np.testing.assert_array_equal, got, want)


# ---- configs -----------------------------------------------------------------------------------


def test_sizes_that_do_not_fit_each_other_are_refused(copy):
    with pytest.raises(SizeMismatch, match="TP003 at num_key_value_heads: 8 query heads for 3"):
        load(copy("llama", num_key_value_heads=3))


def test_fields_left_out_have_the_defaults_of_transformers():
    fields = json.loads((FIXTURES / "mistral" / "config.json").read_text())
    want = read_fields(fields, "config.json")
    assert want.sliding_window == 5
    for name in ("rms_norm_eps", "rope_theta", "hidden_act", "tie_word_embeddings"):
        del fields[name]  # the fixture has the defaults
    assert read_fields(fields, "config.json") == want
    del fields["sliding_window"]
    assert read_fields(fields, "config.json").sliding_window == 4096
    fields["sliding_window"] = None
    assert read_fields(fields, "config.json").sliding_window is None
    fields["head_dim"] = None
    assert read_fields(fields, "config.json").head_dim == 32 // 4


def test_rope_is_read_as_transformers_5_writes_it():
    fields = json.loads((FIXTURES / "llama" / "config.json").read_text())
    want = read_fields(fields, "config.json")
    scaling = fields.pop("rope_scaling")
    fields["rope_parameters"] = scaling | {"rope_theta": fields.pop("rope_theta")}
    assert read_fields(fields, "config.json") == want


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_a_family(name):
    fields = json.loads(json.dumps(write_fields(PRESETS[name])))
    assert read_fields(fields, name) == dataclasses.replace(
        PRESETS[name], **runtime_of(type(PRESETS[name]))
    )
    found = {"q": "qwen3", "g": "gpt2", "m": "mixtral"}.get(name[0], "llama")
    known = {"qwen3-30b-a3b": "qwen3_moe", "deepseek-v3": "deepseek_v3"}
    known |= {"deepseek-v2-lite": "deepseek_v2"}
    known |= dict.fromkeys(("gpt-oss-20b", "gpt-oss-120b"), "gpt_oss")
    assert fields["model_type"] == known.get(name, found)


def test_a_mixture_of_families_has_no_config_json():
    config = LlamaConfig(
        **dict.fromkeys(("vocab_size", "hidden_size", "num_hidden_layers"), 8),
        **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 2),
        head_dim=4,
        intermediate_size=8,
        qkv_bias=True,
        norm_offset=True,
    )
    with pytest.raises(UnsupportedModel, match="no Hugging Face family has this combination"):
        write_fields(config)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"layer_types": ("full_attention",) * 2, "sliding_window": 3}, "layer_types"),
        ({"layer_types": ("sliding_attention",)}, "sliding_window"),
        ({"rotary_layers": (True,) * 2}, "rotary_layers"),
        ({"num_experts": 2}, "num_experts_per_tok"),
        ({"num_experts": 2, "num_experts_per_tok": 3}, "num_experts_per_tok"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok"),
    ],
)
def test_impossible_options_are_refused(change, where):
    sizes = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4}
    with pytest.raises(SizeMismatch) as error:
        LlamaConfig(**sizes, **heads, **change)
    assert error.value.where == where
