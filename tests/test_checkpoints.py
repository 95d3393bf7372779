"""Checkpoints: equal after a round trip, kept, skipped when damaged, refused with what differs."""

import contextlib
import json
import logging
import random
import shutil
import sys
import threading
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from stored_states import logical, placed

import jaxtp
from jaxtp import Checkpoints
from jaxtp.errors import BadCheckpoint, CheckpointMismatch, JaxtpWarning
from jaxtp.io import checkpoint_arrays
from jaxtp.io.checkpoint_metadata import About, Summary
from jaxtp.io.fingerprint import fingerprints
from jaxtp.mesh.build import make_mesh


def tree_on(mesh, *spec, offset=0):
    def put(x, *spec):
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))

    kernel = jnp.arange(4096, dtype=jnp.float32).reshape(64, 64) + offset
    return {
        "kernel": put(kernel, *spec),
        "state": (put(jnp.int32(3 + offset)), 7),
        "rng": put(jax.random.key(offset)),
        "half": put(jnp.ones(8, jnp.bfloat16) * offset, "tp"),
    }


def assert_equal(found, expected):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if hasattr(one, "dtype") and jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        np.testing.assert_array_equal(one, other)
        assert jnp.result_type(one) == jnp.result_type(other)


def saved(folder, *steps, keep_last=3):
    """A folder with a checkpoint of each step, told apart by `offset`."""
    with Checkpoints(folder, keep_last=keep_last) as checkpoints:
        for step in steps:
            checkpoints.save(step, tree_on(make_mesh(tp=8), "tp", offset=step), extra={"at": step})
    return Checkpoints(folder)


def test_round_trip_onto_another_mesh(tmp_path):
    checkpoints = saved(tmp_path, 5)
    like = tree_on(make_mesh(tp=4, dp=2), None, "tp")
    kernel = like["kernel"]
    like["kernel"] = jax.ShapeDtypeStruct(kernel.shape, kernel.dtype, sharding=kernel.sharding)
    restored = checkpoints.restore(like)
    assert_equal(restored.state, tree_on(make_mesh(tp=8), offset=5))
    assert restored.state["kernel"].sharding == kernel.sharding
    assert (restored.step, restored.plan, restored.extra) == (5, None, {"at": 5})
    assert restored.origin["mesh"] == {"tp": 8}
    assert restored.origin["versions"]["jax"] == jax.__version__


def test_restored_arrays_are_donated(tmp_path):
    state = saved(tmp_path, 5).restore(tree_on(make_mesh(tp=8), "tp")).state
    before = [shard.data.unsafe_buffer_pointer() for shard in state["kernel"].addressable_shards]
    new = jax.jit(lambda x: x + 1, donate_argnums=0)(state["kernel"])
    assert state["kernel"].is_deleted()
    after = [shard.data.unsafe_buffer_pointer() for shard in new.addressable_shards]
    assert before == after
    np.testing.assert_array_equal(new, np.arange(4096).reshape(64, 64) + 6)


def test_state_may_be_donated_while_it_is_written(tmp_path):
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    sharding = NamedSharding(make_mesh(tp=8), PartitionSpec("tp"))
    x = add(jax.device_put(jnp.zeros((1024, 1024)), sharding))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"x": x})
        for _ in range(5):
            x = add(x)
        x.block_until_ready()
    restored = checkpoints.restore({"x": x})
    np.testing.assert_array_equal(restored.state["x"], np.ones((1024, 1024)))


def test_what_was_bound_to_no_device_is_not_bound_to_one(tmp_path):
    state = tree_on(make_mesh(tp=8), "tp") | {"mine": jax.random.key(5), "count": jnp.int32(2)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        restored = checkpoints.restore(state).state
    assert_equal(restored, state)
    use = jax.jit(lambda s: s["kernel"] * s["count"] + jax.random.uniform(s["mine"]))
    np.testing.assert_array_equal(use(restored), use(state))


def test_devices_read_pieces_that_are_smaller_than_what_was_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_arrays, "CHUNK_BYTES", 2**20)
    x = jnp.arange(3 * 2**20, dtype=jnp.float32).reshape(3 * 2**10, 2**10)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"x": x, "count": 3})
        monkeypatch.setattr(checkpoint_arrays, "IN_FLIGHT_GB", 0)
        sharding = NamedSharding(make_mesh(tp=8), PartitionSpec("tp"))
        like = {"x": jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), "count": 0}
        np.testing.assert_array_equal(checkpoints.restore(like).state["x"], x)
    metadata = dict(ocp.StandardCheckpointHandler().metadata(tmp_path / "1" / "state"))
    assert np.prod(metadata["x"].storage.chunk_shape) * 4 <= 2**20


def test_newest_few_are_kept(tmp_path):
    assert saved(tmp_path, 1, 2, 3, 10, keep_last=2).steps() == [3, 10]


def test_steps_only_go_up(tmp_path):
    checkpoints = saved(tmp_path, 4)
    for step in (3, 4):
        with pytest.raises(BadCheckpoint, match=f"step {step} does not come after the steps 4"):
            checkpoints.save(step, {"x": jnp.zeros(1)})
    checkpoints.close()


def test_what_cannot_be_written_is_a_coded_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadCheckpoint, match=r"TP090 at .*: cannot be written: NotADirectoryError"):
        Checkpoints(tmp_path / "file" / "run").save(1, {"x": jnp.zeros(1)})


def largest(folder):
    return max((folder / "state").rglob("d/*"), key=lambda path: path.stat().st_size)


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def empty(folder):
    shutil.rmtree(folder)
    folder.mkdir()


DAMAGES = {
    "truncated array": (lambda f: cut(largest(f)), r"state/.* has [\d,]+ of [\d,]+ bytes"),
    "missing array": (lambda f: largest(f).unlink(), r"state/.* has 0 of [\d,]+ bytes"),
    "flipped bit": (lambda f: flip(largest(f)), ""),
    "no metadata of arrays": (
        lambda f: (f / "state" / "_METADATA").unlink(),
        "state/_METADATA has 0 of",
    ),
    "no arrays": (lambda f: shutil.rmtree(f / "state"), "FileNotFoundError"),
    "no note": (lambda f: shutil.rmtree(f / "jaxtp"), "FileNotFoundError"),
    "garbage in the note": (
        lambda f: (f / "jaxtp" / "metadata").write_text('{"format": 1, "st'),
        "JSONDecodeError",
    ),
    "another note": (lambda f: (f / "jaxtp" / "metadata").write_text("[1]"), "TypeError"),
    "newer format": (
        lambda f: (f / "jaxtp" / "metadata").write_text('{"format": 99}'),
        "it was written by a newer jaxtp",
    ),
    "empty folder": (empty, "FileNotFoundError"),
    "file": (lambda f: (shutil.rmtree(f), f.write_text("")), "NotADirectoryError|FileNotFound"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_is_skipped(tmp_path, damage):
    harm, text = DAMAGES[damage]
    checkpoints = saved(tmp_path, 2, 4)
    harm(tmp_path / "4")
    like = tree_on(make_mesh(tp=8), "tp")
    expected = rf"TP090 at {tmp_path}/4: skipped, ({text})"
    with pytest.warns(JaxtpWarning, match=expected) as warned:
        restored = checkpoints.restore(like)
    assert [warning.filename for warning in warned] == [__file__]
    assert restored.step == 2
    assert_equal(restored.state, tree_on(make_mesh(tp=8), offset=2))

    # The run goes on, and comes by the damaged step again.
    checkpoints.save(4, tree_on(make_mesh(tp=8), "tp", offset=40))
    assert checkpoints.steps() == [2, 4]
    assert checkpoints.restore(like).state["state"][0] == 43
    assert (tmp_path / "4.set-aside").exists()
    checkpoints.close()


def test_only_numbers_are_steps(tmp_path):
    for name in ("²", "٣", "007", "1.set-aside", "5"):
        (tmp_path / name).mkdir()
    assert Checkpoints(tmp_path).steps() == [5]
    (tmp_path / "5" / "jaxtp").mkdir()
    for text in ("", "[1]", "[" * 100_000, '{"format": 2, "origin": {"mesh": {"dp": "x"}}}'):
        (tmp_path / "5" / "jaxtp" / "metadata").write_text(text)
        assert Summary.of_newest(tmp_path) is None


def test_unfinished_checkpoint_is_skipped_and_cleared_away(tmp_path):
    checkpoints = saved(tmp_path, 2)
    shutil.copytree(tmp_path / "2", tmp_path / "4.orbax-checkpoint-tmp")
    like = tree_on(make_mesh(tp=8), "tp")
    with pytest.warns(JaxtpWarning, match=r"4\.orbax-checkpoint-tmp: skipped, it was never finish"):
        assert checkpoints.restore(like).step == 2
    checkpoints.save(4, like)
    checkpoints.close()
    assert {path.name for path in tmp_path.iterdir()} == {"2", "4"}


def test_none_good_is_an_error(tmp_path):
    checkpoints = saved(tmp_path, 2, 4)
    for step in ("2", "4"):
        cut(largest(tmp_path / step))
    like = tree_on(make_mesh(tp=8), "tp")
    with pytest.raises(BadCheckpoint, match=r"none of 2 checkpoints can be read: 4: .*; 2: state/"):
        checkpoints.restore(like)
    with pytest.raises(BadCheckpoint, match=r"TP090 at .*/2: state/"):
        checkpoints.restore(like, step=2)
    for folder in (tmp_path / "2", tmp_path / "missing"):
        with pytest.raises(BadCheckpoint, match=r"TP090 at .*: no checkpoint"):
            Checkpoints(folder).restore(like)


def test_older_checkpoint_can_be_asked_for(tmp_path):
    checkpoints = saved(tmp_path, 2, 4, 6)
    like = tree_on(make_mesh(tp=8), "tp")
    assert checkpoints.restore(like, step=2).extra == {"at": 2}
    checkpoints.save(3, like)
    assert checkpoints.steps() == [2, 3]
    checkpoints.close()
    assert {path.name for path in tmp_path.iterdir()} == {"2", "3", "4.set-aside", "6.set-aside"}


def test_another_model_is_refused_with_the_differences(tmp_path):
    checkpoints = saved(tmp_path, 4)
    like = tree_on(make_mesh(tp=8))
    like["kernel"], like["bias"] = jnp.zeros((8, 4)), jnp.zeros(8)
    like["half"] = jnp.zeros(8, jnp.float32)
    del like["rng"]
    with pytest.raises(CheckpointMismatch, match=r"TP091 at .*/4: 4 of 6 arrays differ: ") as e:
        checkpoints.restore(like)
    for text in (
        "bias: nothing saved, float32[8] wanted",
        "half: bfloat16[8] saved, float32[8] wanted",
        "kernel: float32[64, 64] saved, float32[8, 4] wanted",
        "rng: uint32[2] saved, nothing wanted",
    ):
        assert text in str(e.value)


def test_each_plan_gets_the_form_that_it_stores(tmp_path):
    # All pairs of meshes are in tests/legs/test_checkpoint_meshes.py.
    state, plan = placed("pp2 tp4 in rounds")
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, plan=plan)
        for name in ("ep2 cp2 tp2, ZeRO 3", "tp8"):
            like, target = placed(name)
            restored = checkpoints.restore(like, plan=target)
            found = jaxtp.unshard(restored.state, target)
            jax.tree.map(np.testing.assert_array_equal, found, logical())
    # Without a plan the target has the model's own form.
    with pytest.raises(
        CheckpointMismatch, match=r"float32\[61, 32\] saved, float32\[64, 32\] want"
    ):
        checkpoints.restore(like)


def test_note_is_plain_json(tmp_path):
    mesh = make_mesh(tp=8)
    plan = jaxtp.make_plan({"mlp": {"kernel": jnp.zeros((64, 64))}}, mesh, strict=False)
    params = jaxtp.shard({"mlp": {"kernel": jnp.ones((64, 64))}}, mesh, plan=plan)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, params, plan=plan, extra={"seed": 0})
    note = json.loads((tmp_path / "1" / "jaxtp" / "metadata").read_text())
    assert note["plan"] == json.loads(plan.to_json())
    assert (note["step"], note["extra"], note["origin"]["processes"]) == (1, {"seed": 0}, 1)
    assert checkpoints.restore(params, plan=plan).plan == plan


def test_no_flipped_bit_of_what_describes_a_checkpoint_goes_unnoticed(tmp_path):
    checkpoints, like = saved(tmp_path, 2), tree_on(make_mesh(tp=8), "tp")
    folder, chance = tmp_path / "2", random.Random(0)
    note, summary = About.read(folder), Summary.of_newest(tmp_path)
    assert summary.mesh == note.origin["mesh"]
    text = (folder / "jaxtp" / "metadata").read_bytes()
    origin = range(8 * text.index(b'"origin"'), 8 * text.index(b'"extra"'))
    for bit in [*chance.sample(range(8 * len(text)), 100), *chance.sample(origin, 50)]:
        harmed = bytearray(text)
        harmed[bit // 8] ^= 1 << bit % 8
        (folder / "jaxtp" / "metadata").write_bytes(harmed)
        with contextlib.suppress(BadCheckpoint):
            assert About.read(folder) == note  # 1e-5 may be spelled 1E-5
        assert Summary.of_newest(tmp_path) in (None, summary)
    (folder / "jaxtp" / "metadata").write_bytes(text)

    for path in folder.glob("state/*"):
        # Of that one nothing but the name is ever read.
        if path.is_file() and path.name != "commit_success.txt":
            before = path.read_bytes()
            flip(path)
            with pytest.raises(BadCheckpoint, match=r"TP090 at .*/2: "):
                checkpoints.restore(like)
            path.write_bytes(before)
    assert checkpoints.restore(like).step == 2


def test_abandoned_reads_and_writes_are_hushed_and_nothing_else(monkeypatch, caplog):
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)
    checkpoint_arrays.hush_abandoned.cache_clear()
    with pytest.raises(BadCheckpoint), checkpoint_arrays.reading(Path("folder")):
        raise ValueError("a damaged array")
    closed, other = (
        types.SimpleNamespace(exc_value=RuntimeError(text))
        for text in ("Event loop is closed", "x")
    )
    sys.unraisablehook(closed)
    sys.unraisablehook(other)
    assert seen == [other]
    for coroutine in ("orbax.read()", "mine()"):
        text = f"Task exception was never retrieved\nfuture: <Task coro=<{coroutine}>>"
        logging.getLogger("asyncio").error(text)
    assert [record.getMessage()[-9:] for record in caplog.records] == ["<mine()>>"]


def test_fingerprints_know_neither_mesh_nor_padding_but_every_bit():
    mesh = make_mesh(tp=8)
    x = jax.random.normal(jax.random.key(0), (64, 8))
    spread = jax.device_put(x, NamedSharding(mesh, PartitionSpec("tp")))
    padded = jnp.pad(x, ((0, 8), (3, 0)))
    flipped = x.at[5, 5].set(jnp.nextafter(x[5, 5], 9))
    others = {
        "int8": jnp.int8([-1, 2]),
        "bool": jnp.array([True, False]),
        "bf16": jnp.ones(3, "bfloat16"),
        "complex": jnp.complex64([1j]),
        "key": jax.random.key(7),
    }
    found = fingerprints({"x": x, "spread": spread, "padded": padded, "flipped": flipped} | others)
    assert found["x"] == found["spread"] == found["padded"] != found["flipped"]
    assert len({found[name] for name in others}) == len(others)
    assert 0 not in found.values()


def dropout_step(mesh):
    """A step whose dropout is a function of the state's key and the step alone."""

    def step(state):
        key = jax.random.fold_in(state["rng"], state["step"])
        kept = jax.random.bernoulli(key, 0.5, state["kernel"].shape)
        new = state["kernel"] * jnp.where(kept, 1.01, 0.99)
        return {"kernel": new, "rng": state["rng"], "step": state["step"] + 1}

    spread = NamedSharding(mesh, PartitionSpec(None, "tp"))
    whole = NamedSharding(mesh, PartitionSpec())
    places = {"kernel": spread, "rng": whole, "step": whole}
    kernel = jnp.arange(4096.0).reshape(64, 64)
    first = {"kernel": kernel, "rng": jax.random.key(3), "step": jnp.int32(0)}
    return jax.device_put(first, places), jax.jit(step, out_shardings=places)


def test_dropout_is_the_same_on_every_mesh_and_after_a_restart(tmp_path):
    found = []
    for sizes in ({"tp": 8}, {"tp": 2, "dp": 4}, {"tp": 1, "dp": 8}):
        state, step = dropout_step(make_mesh(**sizes))
        for _ in range(6):
            state = step(state)
        found.append(np.asarray(state["kernel"]))
    state, step = dropout_step(make_mesh(tp=4, dp=2))
    with Checkpoints(tmp_path) as checkpoints:
        for _ in range(3):
            state = step(state)
        checkpoints.save(3, state)
    state, step = dropout_step(make_mesh(tp=8))
    state = checkpoints.restore(state).state
    for _ in range(3):
        state = step(state)
    for kernel in found:
        np.testing.assert_array_equal(kernel, np.asarray(state["kernel"]))


def test_a_step_waits_for_a_slow_disk_only_behind_another_save(tmp_path, monkeypatch):
    """Orbax writes as ever; the disk takes what it wrote when the test says so."""
    taken, finalize = threading.Event(), checkpoint_arrays.Handler.finalize

    def slowly(handler, directory):
        assert taken.wait(60)
        finalize(handler, directory)

    monkeypatch.setattr(checkpoint_arrays.Handler, "finalize", slowly)
    mesh = jaxtp.make_mesh(tp=8)
    rows = NamedSharding(mesh, PartitionSpec("tp"))
    w = jax.device_put(jax.random.normal(jax.random.key(0), (512, 1024)), rows)
    step = jax.jit(lambda w: w + 1, donate_argnums=0)
    want = np.asarray(w)
    with jaxtp.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": w})
        w = jax.block_until_ready(step(w))
        # The arrays were copied and no more: the next step is done, and the disk has nothing yet.
        assert not (tmp_path / "1").exists()
        threading.Timer(0.2, taken.set).start()
        checkpoints.save(2, {"w": w})
        assert taken.is_set()  # the second waits for the first to be written
        w = jax.block_until_ready(step(w))
        assert checkpoints.steps() == [1, 2]
        restored = checkpoints.restore({"w": w}, step=2)
    np.testing.assert_array_equal(restored.state["w"], want + 1)
