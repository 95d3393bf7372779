"""Compiling for GPUs that are not there, and what the report says; the compiler is the real one."""

import dataclasses
import functools
import importlib.util
import json
import re

import compiled_programs as programs
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtp
from jaxtp.compile import analysis, compiler
from jaxtp.compile.analysis import analyse
from jaxtp.compile.collectives import find
from jaxtp.compile.deviceless import preflight
from jaxtp.compile.hlo import parse
from jaxtp.compile.options import OVERLAP, PREFLIGHT, compile_options
from jaxtp.cost.bound import Need
from jaxtp.cost.floor import floor_bytes
from jaxtp.errors import (
    BadMesh,
    BadOption,
    BadStep,
    BadTarget,
    CompileFailed,
    CompilerCrashed,
    CompilerTimeout,
    GpuPluginMissing,
)
from jaxtp.hardware.gpus import KINDS, Target

MESH = {"dp": 2, "tp": 4}
MESSAGE = programs.BATCH // 2 * programs.TOKENS * programs.WIDTH * 2
FLOOR = floor_bytes(size=4, message_bytes=MESSAGE, layers=programs.LAYERS)
MODEL_FLOPS = 1e12


@functools.cache
def good_report():
    """The step with its plan, donated, compiled for two hosts without a device in sight."""
    mesh = programs.abstract_mesh(2, 4)
    return preflight(
        jax.jit(programs.make_step(mesh), donate_argnums=0),
        programs.arguments(mesh),
        target="h100:2x4",
        options=compile_options(overlap="aggressive"),
        floor_bytes=FLOOR,
        model_flops=MODEL_FLOPS,
    )


@functools.cache
def bad_report():
    """One weight stored along the wrong dim and nothing donated, by module:function."""
    return preflight(
        "compiled_programs:entry_step", target="h100:1x8", mesh=MESH, keywords={"split_down": "out"}
    )


def test_communication_is_the_floor():
    report = good_report()
    assert report.floor_bytes == FLOOR
    assert 1 <= report.ratio < 1.01
    assert report.unexpected == {}
    layers = [row for row in report.collectives if row.count == programs.LAYERS]
    tensor = [row for row in layers if row.axes == ("tp",)]
    assert [(row.kind, row.dtype, row.num_bytes) for row in tensor] == [
        ("all-reduce", "bf16", MESSAGE)
    ] * 4
    assert sum(row.backward for row in tensor) == 2
    assert all("compiled_programs.py" in row.source for row in tensor)
    assert sum(report.wire_bytes_by_axes.values()) == pytest.approx(
        sum(row.wire_bytes for row in report.collectives)
    )
    assert report.wire_bytes == report.wire_bytes_by_axes["tp"]


def test_hosts():
    report = good_report()
    assert report.axes_across_hosts == ("dp",)
    assert all(row.crosses_hosts == (row.axes == ("dp",)) for row in report.collectives)
    assert not any("leaves the NVLink domain" in note for note in report.notes)


def test_memory():
    report = good_report()
    weights = sum(_local_bytes(spec, shape) for shape, spec in programs.SPECS.values())
    assert report.alias_bytes == weights
    assert report.not_donated == {}
    assert report.argument_bytes == weights + programs.BATCH // 2 * programs.TOKENS * 4
    assert report.fits
    assert report.card_bytes == Target.parse("h100:1x8").device.memory_bytes
    assert report.peak_bytes == report.argument_bytes + report.temp_bytes + (
        report.output_bytes - report.alias_bytes
    )


def _local_bytes(spec, shape):
    size = 4
    for dim in shape:
        size *= dim
    return size // (4 if "tp" in tuple(spec) else 1)


def test_time_and_overlap():
    report = good_report()
    # Too small to hide much; backward, sums over NVLink move while the network is waited for.
    assert 0 <= report.hidden_forward < 0.3
    assert report.hidden_forward < report.hidden_backward < 1
    sums = [row for row in report.collectives if "tp" in row.axes]
    share = sum(row.exposed_seconds for row in sums) / sum(row.seconds for row in sums)
    assert report.hidden_share == pytest.approx(1 - share)
    peak = 989e12 * report.step_seconds_modelled
    assert report.mfu_modelled == pytest.approx(MODEL_FLOPS / 8 / peak)
    assert report.hfu_modelled == pytest.approx(report.flops_per_device / peak)
    waits = sum(row.exposed_seconds for row in report.collectives)
    # Products this narrow run far below the sustained rate.
    assert report.product_seconds > report.flops_per_device / 700e12
    other = sum(p.seconds * p.repeat for p in report.schedule.work if not p.flops)
    assert report.step_seconds_modelled == pytest.approx(report.product_seconds + other + waits)
    lanes = {box["lane"] for box in report.schedule.timeline()}
    assert lanes == {"compute", "NVLink", "network"}
    starts = [box["start"] for box in report.schedule.timeline()]
    assert starts == sorted(starts)


def test_links_and_the_bound():
    report = good_report()
    inside, across = report.links
    assert (inside.name, across.name) == ("NVLink", "network")
    exposed = sum(row.exposed_seconds for row in report.collectives)
    assert inside.exposed_seconds + across.exposed_seconds == pytest.approx(exposed)
    for link, axes in ((inside, ("tp",)), (across, ("dp",))):
        busy = sum(row.seconds for row in report.collectives if row.axes == axes)
        assert link.busy_seconds == pytest.approx(busy)
    assert report.bound_seconds is report.bound_ratio is None  # nobody said what is needed
    needs = [Need(kind="all-reduce", axes=("dp",), num_bytes=2**30, count=2)]
    links = analysis.seconds_of(needs, MESH, Target.parse("h100:2x4"))
    needy = dataclasses.replace(
        report,
        links=tuple(dataclasses.replace(x, needed_seconds=links[x.name]) for x in report.links),
    )
    # A ring over two hosts sends the array once, through a NIC that sustains half its 50 GB/s.
    assert needy.bound_seconds == pytest.approx(2 * (2**30 / 25e9 + 45e-6))
    assert needy.bound_ratio == pytest.approx(report.step_seconds_modelled / needy.bound_seconds)
    assert f"bound         {needy.bound_seconds * 1e3:.3f} ms" in str(needy)


def test_options_are_reported():
    report = good_report()
    assert report.options["xla_gpu_memory_limit_slop_factor"] == 1000
    assert report.options["xla_gpu_enable_triton_gemm"] is False
    newer = jax.__version_info__ >= (0, 11, 2)
    assert bool(report.unknown_options) != newer


def test_json_has_what_the_command_line_promises():
    data = json.loads(good_report().to_json())
    promised = (
        "wire_bytes floor_bytes ratio hidden_share hidden_forward hidden_backward peak_bytes "
        "card_bytes fits step_seconds_modelled collectives"
    )
    assert set(promised.split()) <= set(data)
    assert data["versions"]["jax"] == jax.__version__
    assert data["collectives"][0]["axes"]


def test_text():
    text = str(good_report())
    for needle in ("h100:2x4", "across hosts: dp", "fits", "1.00", "all-reduce", "(hosts)"):
        assert needle in text
    assert "DOES NOT FIT" not in text
    table = good_report().communication()
    assert "preflight" not in table
    assert max(len(line) for line in table.splitlines() if not line.startswith("note")) <= 132


def test_the_carried_program_is_the_direct_one():
    """Tracing here and compiling elsewhere gives what jit(...).lower(...).compile() gives."""
    direct = programs.compile_here(2, 4)
    stats = direct.memory_analysis()
    mesh = programs.abstract_mesh(2, 4)
    step = jax.jit(programs.make_step(mesh), donate_argnums=0)
    carried = preflight(step, programs.arguments(mesh), target="h100:1x8")
    memory = {
        "argument_bytes": stats.argument_size_in_bytes,
        "output_bytes": stats.output_size_in_bytes,
        "alias_bytes": stats.alias_size_in_bytes,
        "temp_bytes": stats.temp_size_in_bytes,
    }
    here = analyse(direct.as_text(), memory, Target.parse("h100:1x8"), MESH)
    same = [
        field.name
        for field in dataclasses.fields(here)
        if field.name not in ("compile_seconds", "options", "notes", "schedule", "collectives")
    ]
    assert {name: getattr(carried, name) for name in same} == {
        name: getattr(here, name) for name in same
    }
    assert [dataclasses.replace(row, products=()) for row in carried.collectives] == [
        dataclasses.replace(row, products=()) for row in here.collectives
    ]


def test_a_wrong_plan_is_found():
    report = bad_report()
    gathered = [cause for cause in report.unexpected.values() if "params['down']" in cause]
    assert gathered, report.unexpected
    assert "gathered before use" in gathered[0]
    assert report.wire_bytes > 1.2 * FLOOR
    assert report.ratio is None
    assert report.mfu_modelled is None


def test_what_is_not_donated_is_named():
    report = bad_report()
    assert report.alias_bytes == 0
    assert report.not_donated["params['gate']"] == programs.LAYERS * 512 * 2048 * 4 // 4
    assert "tokens" not in report.not_donated
    assert "not donated but could be" in str(report)


def test_what_does_not_fit_says_by_how_much():
    report = dataclasses.replace(good_report(), card_bytes=good_report().peak_bytes - 2**20)
    assert not report.fits
    assert "DOES NOT FIT by 1.00 MiB" in str(report)


@pytest.mark.parametrize("copies", [1, 2])
def test_notes_about_the_card(copies):
    """The same program costed on a GPU that it fills, or overfills."""
    report = good_report()
    small = dataclasses.replace(
        Target.parse("h100:2x4").device, memory_bytes=report.peak_bytes // copies + 2**20
    )
    text = programs.compile_here(2, 4).as_text()
    memory = {f"{p}_bytes": getattr(report, f"{p}_bytes") for p in ("argument", "output", "temp")}
    costed = analyse(
        text,
        {**memory, "alias_bytes": report.alias_bytes},
        Target(device=small, hosts=4, gpus=2),
        MESH,
        options=compile_options(overlap="aggressive"),
    )
    notes = " ".join(costed.notes)
    assert ("does not see" in notes) == costed.fits
    assert ("overlap='auto'" in notes) != costed.fits
    assert "tp leaves the NVLink domain" in notes


def test_cpu_programs_can_be_read_too():
    """For a step that runs elsewhere than on GPUs; CPU XLA moves float32."""
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((1, 8), ("dp", "tp"), axis_types=auto)
    shapes = [((64, 256), P(None, "tp")), ((256, 64), P("tp"))]
    x, w = (jax.device_put(jnp.ones(s, jnp.bfloat16), NamedSharding(mesh, p)) for s, p in shapes)
    whole = NamedSharding(mesh, P())
    compiled = jax.jit(lambda x, w: x @ w, out_shardings=whole).lower(x, w).compile()
    memory = {f"{part}_bytes": 0 for part in ("argument", "output", "alias", "temp")}
    report = analyse(compiled.as_text(), memory, Target.parse("h100:1x8"), {"dp": 1, "tp": 8})
    (row,) = report.collectives
    assert (row.kind, row.axes, row.num_bytes) == ("all-reduce", ("tp",), 64 * 64 * 4)
    assert "all-reduce" in report.communication()


def simple_step(x, w, unused):
    return x @ w


def simple_args(mesh):
    def array(*shape, spec=()):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    return array(8, 64), array(64, 64, spec=(None, "tp")), array(1024, 1024)


def test_arguments_that_are_not_used_take_no_memory():
    mesh = programs.abstract_mesh(1, 8)
    report = preflight(simple_step, simple_args(mesh), target="h100:1x8")
    assert report.argument_bytes == 8 * 64 * 4 + 64 * 64 * 4 // 8
    assert report.collectives == ()
    assert report.hidden_share == 1


def test_arrays_on_real_devices_are_arguments_too():
    """The plan a user runs on simulated devices, compiled for the GPUs they will rent."""
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((1, 8), ("dp", "tp"), axis_types=auto)
    x, w, unused = (jax.device_put(jnp.ones(one.shape), one.sharding) for one in simple_args(mesh))
    report = preflight(simple_step, (x, w, unused), target="b200:1x8")
    assert report.mesh == {"dp": 1, "tp": 8}
    assert report.card_bytes == Target.parse("b200:1x8").device.memory_bytes


def test_explicit_meshes():
    """`jax.make_mesh` gives Explicit axes by default; the step then carries them in its types."""
    explicit = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.sharding.AbstractMesh((1, 8), ("dp", "tp"), axis_types=explicit)
    report = preflight(simple_step, simple_args(mesh), target="h100:1x8")
    assert report.argument_bytes == 8 * 64 * 4 + 64 * 64 * 4 // 8


def test_static_arguments_stay_behind():
    split = NamedSharding(programs.abstract_mesh(1, 8), P("tp"))
    w = {"kernel": jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=split)}
    step = jax.jit(
        lambda power, w, unused: jax.tree.map(lambda x: x**power, w),
        static_argnums=0,
        donate_argnums=1,
    )
    program = compiler.trace(step, (3, w, w))
    assert program.arguments == ("w['kernel']",)
    assert program.donated == (True,)


def test_shardings_of_the_jitted_step_count():
    """Arguments without shardings: the step's own `in_shardings` place them."""
    split = NamedSharding(programs.abstract_mesh(1, 8), P("tp"))
    step = jax.jit(lambda w, scale: w * scale, in_shardings=(split, None), donate_argnums=0)
    w = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    report = preflight(step, (w, 2.0), target="h100:1x8", mesh={"dp": 1, "tp": 8})
    assert report.argument_bytes == 64 * 64 * 4 // 8 + 4
    assert report.alias_bytes == 64 * 64 * 4 // 8


def test_what_jit_step_returns_is_compiled_with_its_plan_places_and_donation():
    mesh = jaxtp.make_mesh(tp=4, dp=2)
    params = {"up": jnp.ones((16, 64)), "down": jnp.ones((64, 16))}
    x = jnp.ones((8, 16))

    def step_fn(params, batch):
        def loss(params):
            return jnp.square(jnp.sin(batch @ params["up"]) @ params["down"]).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(jnp.subtract, params, grads), value

    state = jaxtp.shard(params, mesh)
    step = jaxtp.jit_step(step_fn, state, mesh, plan=jaxtp.make_plan(params, mesh))
    report = preflight(step, (state, x), target="h100:1x8")
    assert report.mesh == {"dp": 2, "tp": 4}
    held = 2 * 16 * 64 * 4 // 4
    assert report.argument_bytes == held + 8 * 16 * 4 // 2
    assert report.alias_bytes == held
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert report == dataclasses.replace(
        preflight(step, (params, x), target="h100:1x8"), compile_seconds=report.compile_seconds
    )
    with pytest.raises(BadStep, match="TP133: missing a required argument: 'batch'"):
        preflight(step, (state,), target="h100:1x8")


def test_arguments_without_shardings_are_on_every_device():
    args = jnp.ones((8, 64)), jnp.ones((64, 64))
    report = preflight(jnp.matmul, args, target="h100:1x8", mesh={"dp": 2, "tp": 4})
    assert report.argument_bytes == sum(x.nbytes for x in args)
    assert report.collectives == ()


@pytest.mark.parametrize("overlap", OVERLAP)
def test_overlap_off_makes_every_message_wait(overlap):
    mesh = programs.gpu_mesh(1, 8)

    def step(x, w, y):
        return jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P())), y @ y

    shapes = [((1024, 4096), P(None, "tp")), ((4096, 1024), P("tp")), ((2048, 2048), P())]
    args = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in shapes
    ]
    options = compile_options(overlap=overlap, extra=PREFLIGHT).options
    text = jax.jit(step).lower(*args).compile(dict(options)).as_text()
    (message,) = find(parse(text), {"dp": 1, "tp": 8})
    assert message.is_async == (overlap != "off")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_one_that_the_compiler_knows(kind):
    mesh = programs.gpu_mesh(1, 8, kind)
    compiled = jax.jit(simple_step).lower(*simple_args(mesh)).compile(dict(PREFLIGHT))
    assert parse(compiled.as_text()).num_partitions == 8


@pytest.mark.parametrize(
    ("entry", "error", "needle"),
    [
        ("compiled_programs:entry_abort", CompilerCrashed, "a cycle is detected"),
        ("compiled_programs:entry_error", CompileFailed, "no such layer"),
        ("compiled_programs:no_such_entry", CompileFailed, "no_such_entry"),
    ],
)
def test_what_goes_wrong_in_the_compiler_is_a_coded_error(entry, error, needle):
    with pytest.raises(error, match=needle) as caught:
        preflight(entry, target="h100:1x8", mesh=MESH)
    assert caught.value.fix


def test_time_limit():
    seen = []
    with pytest.raises(CompilerTimeout, match="ran for"):
        preflight(
            "compiled_programs:entry_sleep",
            target="h100:1x8",
            mesh=MESH,
            time_limit=0.5,
            on_progress=seen.append,
        )
    assert seen == sorted(seen)
    assert seen[-1] > 0.5


def test_an_option_that_the_compiler_does_not_know():
    program = compiler.Program(mesh=MESH, entry="compiled_programs:entry_step")
    with pytest.raises(BadOption, match="xla_gpu_nonsense"):
        compiler.compile_for(program, Target.parse("h100:1x8"), {"xla_gpu_nonsense": 1})


def test_a_description_that_the_compiler_cannot_read():
    device = dataclasses.replace(Target.parse("h100:1x8").device, config="gibberish { ]")
    program = compiler.Program(mesh=MESH, entry="compiled_programs:entry_step")
    with pytest.raises(BadTarget, match="target_config"):
        compiler.compile_for(program, Target(device=device, gpus=8), {})


def test_missing_plugin(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(GpuPluginMissing) as caught:
        preflight("compiled_programs:entry_step", target="h100:1x8", mesh=MESH)
    assert f"jax-cuda12-pjrt=={jax.__version__}" in caught.value.fix


def test_mesh_and_target_must_have_one_size():
    with pytest.raises(BadTarget, match=re.escape("8 devices, h100:4x8 has 32")):
        preflight("compiled_programs:entry_step", target="h100:4x8", mesh=MESH)


def test_arguments_must_be_on_one_mesh():
    one, other = programs.abstract_mesh(1, 8), programs.abstract_mesh(2, 4)
    with pytest.raises(BadMesh, match="found none"):
        preflight(simple_step, (1.0, 2.0, 3.0), target="h100:1x8")
    with pytest.raises(BadMesh, match=r"'dp': 1.*'dp': 2"):
        preflight(simple_step, (simple_args(one)[0], *simple_args(other)[1:]), target="h100:1x8")


def test_a_step_that_cannot_be_traced():
    mesh = programs.abstract_mesh(1, 8)
    with pytest.raises(CompileFailed, match="cannot be traced"):
        preflight(simple_step, simple_args(mesh)[:2], target="h100:1x8")


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        # in all-reduces of one message each; an all-gather is half of one
        ({"layers": 3, "ends": False}, 3 * 4),
        ({"layers": 3}, 3 * 4 + 2),
        ({"layers": 3, "training": False}, 3 * 2 + 1),
        ({"layers": 3, "ends": False, "sequence_parallel": True}, 3 * 5),
    ],
)
def test_floor(arguments, messages):
    assert floor_bytes(size=8, message_bytes=800, **arguments) == messages * 2 * 7 / 8 * 800
    assert floor_bytes(size=1, message_bytes=800, **arguments) == 0


def test_a_ragged_product_that_is_dense_is_named():
    def experts(x, w, sizes):
        return jax.lax.ragged_dot(x @ x.T @ x, w, sizes)

    args = (
        jax.ShapeDtypeStruct((256, 128), jnp.bfloat16),
        jax.ShapeDtypeStruct((8, 128, 64), jnp.bfloat16),
        jax.ShapeDtypeStruct((8,), jnp.int32),
    )
    report = preflight(experts, args, target="h100:1x1", mesh={"tp": 1})
    (note,) = [note for note in report.notes if "ragged_dot" in note]
    dense, rest = 8 * 256 * 128 * 64, 2 * 256 * 256 * 128
    assert "8 groups on every row, 8 x the FLOPs needed" in note
    assert f"{dense / (dense + rest):.0%} of the step's" in note
    assert "test_compile_preflight.py" in note
