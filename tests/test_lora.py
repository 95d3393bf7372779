"""Adapters of our models: beside their kernels, from and to PEFT folders, merged, and trained."""

import dataclasses
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxtp
from jaxtp import models
from jaxtp.activations.by_name import use_plan
from jaxtp.config import settings
from jaxtp.config.batch_sizes import resolve
from jaxtp.config.presets import preset
from jaxtp.config.settings import Batch, Config, Mesh, Precision
from jaxtp.errors import BadCheckpoint, BadConfig, BadWeights, UnsupportedModel
from jaxtp.io.hf.adapters import read_lora
from jaxtp.io.safetensors import read_header, write_file
from jaxtp.mesh.build import make_mesh, plan_mesh
from jaxtp.models import Lora
from jaxtp.plan.trees import leaves
from jaxtp.train.config_step import abstract_state, first_state, step_of
from jaxtp.train.planning import Build, lora_of, model_of, plan_of
from jaxtp.train.preflight import preflight_config
from jaxtp.train.setup import prepare

FIXTURES = Path(__file__).parent / "fixtures" / "hf"
TARGETS = {
    "llama": ("down_proj", "k_proj", "lm_head", "o_proj", "q_proj"),
    "gpt2": ("c_attn", "c_proj"),
    "deepseek_v3": ("kv_b_proj", "o_proj", "q_a_proj"),
}
RANK, ALPHA = 4, 8.0
PRECISE = {
    **{"param_dtype": "float32", "dtype": "float32", "progress": False},
    "replicated_budget": 1.0,  # 99 tokens do not divide
}


def peft_folder(folder, family, rng):
    """An adapter as PEFT writes it, one pair for each tensor that the model's own file has."""
    stored = read_header(FIXTURES / family / "model.safetensors")
    targets = [t for t in TARGETS[family] if any(f".{t}." in f".{name}" for name in stored)]
    arrays = {}
    for name, tensor in stored.items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in targets and name.endswith(".weight"):
            outer, inner = tensor.shape if family != "gpt2" else tensor.shape[::-1]
            prefix = "base_model.model." + ("" if family != "gpt2" else with_prefix(name))
            arrays[f"{prefix}{module}.lora_A.weight"] = rng.normal(size=(RANK, inner)) * 0.3
            arrays[f"{prefix}{module}.lora_B.weight"] = rng.normal(size=(outer, RANK)) * 0.3
    arrays = {name: array.astype(np.float32) for name, array in arrays.items()}
    folder.mkdir()
    tensors = {name: ("float32", array.shape) for name, array in arrays.items()}
    write_file(folder / "adapter_model.safetensors", tensors, (arrays[n] for n in sorted(arrays)))
    fields = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return arrays


def with_prefix(name):
    return "" if name.startswith("transformer.") else "transformer."


def merged_folder(folder, family, arrays):
    """The model's folder with `W + alpha / r B A` in it, computed here with numpy."""
    base = FIXTURES / family
    folder.mkdir()
    (folder / "config.json").write_text((base / "config.json").read_text())
    stored = read_header(base / "model.safetensors")
    weights = {}
    for name, tensor in stored.items():
        raw = tensor.file.read_bytes()[tensor.start : tensor.start + tensor.num_bytes]
        w = np.frombuffer(raw, jnp.dtype(tensor.dtype)).reshape(tensor.shape).astype(np.float32)
        prefix = "base_model.model." + ("" if family != "gpt2" else with_prefix(name))
        a = arrays.get(prefix + name.removesuffix("weight") + "lora_A.weight")
        if a is not None:
            b = arrays[prefix + name.removesuffix("weight") + "lora_B.weight"]
            change = ALPHA / RANK * (b @ a)
            w = w + (change if family != "gpt2" else change.T)
        weights[name] = w
    tensors = {name: ("float32", w.shape) for name, w in weights.items()}
    write_file(folder / "model.safetensors", tensors, (weights[n] for n in sorted(weights)))
    return folder


@nnx.jit
def run(model, tokens):
    return model(tokens)


@pytest.mark.parametrize("family", TARGETS)
def test_peft_folders_in_and_out(family, tmp_path):
    """Loaded beside the kernels, merged, unmerged and written again: the same logits throughout."""
    arrays = peft_folder(tmp_path / "peft", family, np.random.default_rng(0))
    truth = merged_folder(tmp_path / "merged", family, arrays)
    mesh = make_mesh(tp=4, devices=jax.devices()[:4])
    expected, _ = jaxtp.load_hf(truth, mesh, **PRECISE)
    base, _ = jaxtp.load_hf(FIXTURES / family, mesh, **PRECISE)
    model, params = jaxtp.load_hf(FIXTURES / family, mesh, adapter=tmp_path / "peft", **PRECISE)
    lora = model.config.lora
    assert (lora.rank, lora.scale) == (RANK, ALPHA / RANK)
    tokens = jnp.arange(24).reshape(2, 12) % model.config.vocab_size
    plan = jaxtp.make_plan(model, mesh, config=model.config, replicated_budget=1.0)
    with use_plan(plan, plan_mesh(mesh, plan.mesh)):
        want, got = run(expected, tokens), run(model, tokens)
        assert jnp.abs(run(base, tokens) - want).max() > 0.1
        # Sums of a few hundred float32 terms of size one, in another order.
        close = {"atol": 1e-3, "rtol": 1e-4}
        np.testing.assert_allclose(got, want, **close)

        jaxtp.save_adapter(model, tmp_path / "again", plan=plan, base="somewhere")
        again = read_header(tmp_path / "again" / "adapter_model.safetensors")
        assert again.keys() == arrays.keys()
        for name, tensor in again.items():
            raw = tensor.file.read_bytes()[tensor.start : tensor.start + tensor.num_bytes]
            np.testing.assert_array_equal(
                np.frombuffer(raw, np.float32).reshape(tensor.shape), arrays[name]
            )
        assert read_lora(tmp_path / "again") == lora

        adapters = models.merge_lora(model)
        assert model.config.lora is None
        np.testing.assert_allclose(run(model, tokens), want, **close)
        assert jax.tree.structure(nnx.state(model)) == jax.tree.structure(nnx.state(base))
        models.unmerge_lora(model, adapters, lora)
        np.testing.assert_allclose(run(model, tokens), want, **close)
        assert jax.tree.structure(nnx.state(model)) == jax.tree.structure(params)


def test_generation_over_latents_counts_the_adapter_of_what_is_made_of_them(tmp_path):
    arrays = peft_folder(tmp_path / "peft", "deepseek_v3", np.random.default_rng(0))
    truth = merged_folder(tmp_path / "merged", "deepseek_v3", arrays)
    mesh, base = make_mesh(tp=1, devices=jax.devices()[:1]), FIXTURES / "deepseek_v3"
    model, _ = jaxtp.load_hf(base, mesh, adapter=tmp_path / "peft", **PRECISE)
    expected, _ = jaxtp.load_hf(truth, mesh, **PRECISE)
    got, want = (jaxtp.generate(m, [[3, 1, 4]], max_new_tokens=8)[0] for m in (model, expected))
    assert got.tokens == want.tokens


def test_what_an_adapter_folder_cannot_be(tmp_path):
    arrays = peft_folder(tmp_path / "peft", "llama", np.random.default_rng(0))
    mesh = make_mesh(tp=4, devices=jax.devices()[:4])
    config = tmp_path / "peft" / "adapter_config.json"
    fields = json.loads(config.read_text())
    for changes, error, match in (
        ({"use_dora": True}, UnsupportedModel, "use_dora"),
        ({"bias": "all"}, UnsupportedModel, "bias"),
        ({"peft_type": "IA3"}, UnsupportedModel, "IA3"),
        ({"r": 8}, BadWeights, "has shape"),
        ({"r": None}, BadWeights, "r is None"),
    ):
        config.write_text(json.dumps({**fields, **changes}))
        with pytest.raises(error, match=match):
            jaxtp.load_hf(FIXTURES / "llama", mesh, adapter=tmp_path / "peft", **PRECISE)
    config.write_text(json.dumps(fields))
    arrays.pop(next(iter(arrays)))
    tensors = {name: ("float32", array.shape) for name, array in arrays.items()}
    weights = tmp_path / "peft" / "adapter_model.safetensors"
    write_file(weights, tensors, (arrays[n] for n in sorted(arrays)))
    with pytest.raises(BadWeights, match="1 tensors are missing"):
        jaxtp.load_hf(FIXTURES / "llama", mesh, adapter=tmp_path / "peft", **PRECISE)


def test_a_model_with_adapters_is_not_saved_as_one_without(tmp_path):
    config = dataclasses.replace(
        models.config_of("llama-tiny"), lora=Lora(rank=2, alpha=4.0, targets=("q_proj",))
    )
    model = models.build(config)
    with pytest.raises(BadConfig, match="adapters beside its kernels"):
        jaxtp.save_hf(model, tmp_path / "whole")
    jaxtp.save_adapter(model, tmp_path / "adapter")
    with pytest.raises(BadCheckpoint, match="exists"):
        jaxtp.save_adapter(model, tmp_path / "adapter")
    models.merge_lora(model)
    with pytest.raises(BadConfig, match="no adapter"):
        models.merge_lora(model)
    with pytest.raises(BadConfig, match="no adapter"):
        jaxtp.save_adapter(model, tmp_path / "other")
    jaxtp.save_hf(model, tmp_path / "whole", progress=False)


def test_targets_must_exist():
    lora = Lora(rank=2, alpha=4.0, targets=("q_proj", "w_qkv"))
    with pytest.raises(BadConfig, match="called w_qkv"):
        models.build(dataclasses.replace(models.config_of("llama-tiny"), lora=lora))
    with pytest.raises(BadConfig, match="rank 0"):
        Lora(rank=0, alpha=4.0, targets=("q_proj",))


# ------------------------------------------------------------ training


def trained(mesh_sizes, steps=3, **changes):
    """Parameters before and after a few steps, and the optimizer's state."""
    config = Config(
        mesh=Mesh(**mesh_sizes),
        batch=Batch(size=16, accumulation=2),
        precision=Precision(compute="float32"),
        lora=settings.Lora(rank=4, targets="q_proj, o_proj,down_proj"),
        layers=2,
        seq_len=16,
        **changes,
    )
    count = math.prod(mesh_sizes.values())
    config = resolve(config, count)
    mesh = make_mesh(devices=jax.devices()[:count], **mesh_sizes)
    build = Build.of(config)
    plan = plan_of(build, mesh)
    state = jaxtp.init_sharded(lambda: first_state(build), None, mesh, plan=plan)
    before = {path: np.asarray(leaf) for path, leaf in leaves(state.params)}
    step = step_of(build, plan, mesh, state)
    tokens = jax.random.randint(jax.random.key(0), (16, 17), 0, 256)
    for _ in range(steps):
        state, metrics = step(state, jaxtp.shard_batch({"tokens": tokens}, mesh))
    after = {path: np.asarray(leaf) for path, leaf in leaves(state.params)}
    return before, after, state.opt_state, float(metrics["loss"])


def test_only_adapters_are_trained_on_any_mesh():
    """The base has neither gradients nor optimizer state, and a mesh changes no number."""
    before, after, opt_state, loss = trained({"tp": 4, "dp": 2})
    _, alone, _, loss_alone = trained({"dp": 8, "tp": 1})
    changed = {path for path in after if not np.array_equal(before[path], after[path])}
    adapters = {path for path in after if "lora_" in path}
    assert changed == adapters
    assert len(adapters) == 6
    # Adam's two moments of the adapters, and counters.
    kept = sum(leaf.size for leaf in jax.tree.leaves(opt_state) if leaf.ndim)
    assert kept == 2 * sum(after[path].size for path in adapters)
    assert loss == pytest.approx(loss_alone, rel=1e-5)
    for path in adapters:
        # Adam divides by the root of a mean of squares: rounding of small gradients shows at the
        # size of a step, 3 x 3e-4, times its relative size.
        np.testing.assert_allclose(after[path], alone[path], atol=1e-4)


def test_preflight_shows_what_is_saved():
    """Gradients and moments of the base are gone: a tenth of the bytes of training everything."""

    def held(rank):
        config = Config(model="llama3-8b", lora=settings.Lora(rank=rank))
        config = resolve(dataclasses.replace(config, mesh=Mesh(tp=8)), 8)
        state = abstract_state(Build.of(config))
        return [
            sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
            for tree in (state.params, state.opt_state)
        ]

    (whole, moments), (adapted, few) = held(0), held(16)
    assert moments == pytest.approx(2 * whole, rel=1e-6)
    assert adapted < 1.01 * whole
    assert few < 0.01 * moments


def test_settings_name_the_adapters():
    assert lora_of(settings.Lora()) is None
    assert lora_of(settings.Lora(rank=8)) == Lora(rank=8, alpha=16.0, targets=("q_proj", "v_proj"))
    with pytest.raises(BadConfig, match="no module"):
        lora_of(settings.Lora(rank=8, targets=" ,"))


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A folder of weights and of text, and the settings of a run that begins with them."""
    root = tmp_path_factory.mktemp("weights")
    sizes = dataclasses.replace(models.config_of("llama-tiny"), num_hidden_layers=2)
    model = models.build(sizes, nnx.Rngs(7))
    jaxtp.save_hf(model, root / "hf", progress=False)
    (root / "text").mkdir()
    for number in range(20):
        (root / "text" / f"{number}.txt").write_text("the cat sat on the mat " * 40)
    config = Config(
        weights=str(root / "hf"),
        steps=2,
        seq_len=16,
        batch=Batch(size=4),
        mesh=Mesh(dp=2, tp=4),
        precision=Precision(compute="float32"),
        data=settings.Data(files=f"{root}/text/*.txt"),
    )
    return config, dict(leaves(nnx.state(model, nnx.Param)))


@pytest.mark.parametrize("rank", [0, 4])
def test_training_begins_with_the_weights_of_a_folder(begun, rank):
    config, want = begun
    # Schedule-free optimizers begin with a copy of the parameters.
    config = dataclasses.replace(
        config,
        lora=settings.Lora(rank=rank),
        optimizer=settings.Optimizer(name="schedule_free_adamw", schedule="constant"),
    )
    setup = prepare(config)
    assert setup.build.model.num_hidden_layers == 2
    got = dict(leaves(jaxtp.unshard(setup.state.params, setup.plan)))
    assert len(got) == len(want) + (4 if rank else 0)
    for path, leaf in want.items():
        np.testing.assert_array_equal(got[path], leaf, err_msg=path)
    copies = {
        path: leaf for path, leaf in leaves(jaxtp.unshard(setup.state.opt_state)) if "/z/" in path
    }
    assert copies
    for path, leaf in copies.items():
        np.testing.assert_array_equal(leaf, got[path.split("/z/")[1]], err_msg=path)
    state, metrics = setup.step(setup.state, setup.placed(setup.text.train(0)))
    assert jnp.isfinite(metrics["loss"])
    moved = dict(leaves(jaxtp.unshard(state.params, setup.plan)))
    same = {path for path, leaf in got.items() if np.array_equal(leaf, moved[path])}
    assert same >= want.keys() if rank else not same


def test_weights_that_cannot_be_begun_with(begun, tmp_path):
    config, _ = begun
    with pytest.raises(BadConfig, match="TP020 at layers: 3 layers of a model whose weights"):
        model_of(dataclasses.replace(config, layers=3))
    with pytest.raises(BadWeights, match=r"TP095 at .*config\.json: cannot be read"):
        model_of(dataclasses.replace(config, weights=str(tmp_path)))


def test_adapters_add_no_collective_and_little_to_each():
    """Counted in steps compiled for GPUs, with messages far beyond what XLA combines by default."""
    report = {rank: preflight_config(compiled_run(rank))[1] for rank in (0, 4)}
    counts = {rank: sum(row.count for row in one.collectives) for rank, one in report.items()}
    assert counts[4] <= counts[0]
    wire = {rank: sum(row.wire_bytes for row in one.collectives) for rank, one in report.items()}
    # A layer sums a narrow product forward for each of its two row maps, and backward one for each
    # of its five column maps: seven of rank 4 beside four of width 64.
    assert wire[0] < wire[4] < wire[0] * (1 + 7 * 4 / (4 * 64) + 0.01)
    # Neither gradients nor moments of what is frozen.
    assert report[4].argument_bytes < 0.6 * report[0].argument_bytes
    assert report[4].peak_bytes < report[0].peak_bytes


def compiled_run(rank):
    """A run of two layers on four H100, whose messages are above the threshold for combining."""
    config = preset(
        "llama-tiny",
        **{
            "layers": 2,
            "mesh.tp": 4,
            "batch.size": 8,
            "seq_len": 128,
            "attention": "xla",
            "communication.gradient_fusion": 1024,
            "lora.rank": rank,
            "lora.targets": "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj",
        },
    )
    return dataclasses.replace(config, target="h100:1x4")
