"""Axis names, sizes and meshes: rows M1 to M4 of the failure catalogue start here."""

import json

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh

import jaxtp
from jaxtp.errors import BadMesh, IdleDevices, NoTensorAxis
from jaxtp.mesh import build
from jaxtp.mesh.axes import Axis, MeshShape, Shards, legal_ways, splits


def test_make_mesh_puts_tp_innermost_with_auto_axes():
    mesh = jaxtp.make_mesh(tp=2, dp=2, fsdp=2)
    assert mesh.axis_names == ("dp", "fsdp", "tp")
    assert set(mesh.axis_types) == {AxisType.Auto}
    ids = np.vectorize(lambda d: d.id)(mesh.devices)
    assert ids[0, 0].tolist() == [0, 1]


def test_minus_one_takes_what_is_left():
    assert dict(jaxtp.make_mesh(tp=2, dp=-1).shape) == {"dp": 4, "tp": 2}
    assert dict(jaxtp.make_mesh(tp=-1).shape) == {"tp": 8}


@pytest.mark.parametrize(
    ("sizes", "error", "text"),
    [
        ({"tp": 16}, BadMesh, "need 16 devices, there are 8"),
        ({"tp": 3, "dp": -1}, BadMesh, "8 devices do not divide by 3"),
        ({"tp": -1, "dp": -1}, BadMesh, "at most one is -1"),
        ({"tp": 0}, BadMesh, "sizes are 1 or more"),
        ({"tp": 2, "dp": 2}, IdleDevices, "4 of 8 devices, 4 would idle"),
    ],
)
def test_sizes_that_do_not_work_say_what_would(sizes, error, text):
    with pytest.raises(error, match=text):
        jaxtp.make_mesh(**sizes)


@pytest.mark.parametrize("sizes", [{"tp": "4"}, {"tp": None}, {"tp": 2.0}, {"tp": True}, {"tq": 2}])
def test_sizes_that_are_none_say_which_axes_there_are(sizes):
    with pytest.raises(BadMesh, match="TP010"):
        jaxtp.make_mesh(**{"tp": 1, **sizes})


@pytest.mark.parametrize(
    "mesh", [None, 4, "tp", {}, {"tp": 2.5}, {"tp": float("nan")}, {"tp": "4"}]
)
def test_what_is_no_mesh(mesh):
    with pytest.raises(BadMesh, match="TP010"):
        MeshShape.of(mesh)


def test_one_mesh_axis_has_one_purpose():
    with pytest.raises(BadMesh, match="'tp', stand for dp, tp"):
        MeshShape.of({"tp": 4}, {"tp": "tp", "dp": "tp"})


def test_every_row_of_the_axis_table_works_in_a_mesh():
    for axis in Axis:
        shape = MeshShape.of(
            jaxtp.make_mesh(
                **{"tp": 4, axis.value: 2}, devices=jax.devices()[: 2 if axis is Axis.TP else 8]
            )
        )
        assert shape.size_of(axis) == 2
        assert shape.name_of(axis) == axis
        for what in Shards:
            assert (axis in shape.sharding(what)) == (what in axis.shards)
        assert MeshShape.from_data(json.loads(json.dumps(shape.to_data()))) == shape
        assert shape.without([axis]).size_of(axis) == 1


def test_fewer_devices_on_purpose():
    assert jaxtp.make_mesh(tp=2, devices=jax.devices()[:2]).size == 2


@pytest.mark.parametrize(
    "mesh",
    [
        jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2),
        jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2),
        AbstractMesh((2, 4), ("dp", "tp")),
        {"dp": 2, "tp": 4},
        MeshShape((("dp", 2), ("tp", 4)), others=((Axis.DP, "dp"),)),
    ],
    ids=["explicit", "auto", "abstract", "mapping", "shape"],
)
def test_every_way_to_say_a_mesh(mesh):
    shape = MeshShape.of(mesh)
    assert shape == MeshShape((("dp", 2), ("tp", 4)), others=((Axis.DP, "dp"),))
    assert shape.batch == ("dp",)
    assert (shape.tp_size, shape.num_devices, shape["dp"]) == (4, 8, 2)


def test_other_axis_names_need_a_mapping_and_the_error_gives_it():
    mesh = {"data": 2, "model": 4}
    with pytest.raises(NoTensorAxis, match=r'axis_names=\{"tp": "model"\}'):
        MeshShape.of(mesh)
    shape = MeshShape.of(mesh, {"tp": "model", "dp": "data"})
    assert (shape.tp, shape.batch) == (("model",), ("data",))


@pytest.mark.parametrize("names", [{"tp": "nope"}, {"tensor": "model"}])
def test_a_mapping_that_points_nowhere(names):
    with pytest.raises(BadMesh):
        MeshShape.of({"data": 2, "model": 4}, names)


def test_factored_axes_keep_the_users_device_order():
    mesh = jaxtp.make_mesh(tp=8)
    shape = MeshShape.of(mesh).factored((4, 2))
    fine = build.plan_mesh(mesh, shape)
    assert dict(fine.shape) == {"tp_0": 4, "tp_1": 2}
    assert fine.devices.flatten().tolist() == mesh.devices.flatten().tolist()
    assert set(fine.axis_types) == {AxisType.Auto}
    assert shape.expand(("tp",)) == ("tp_0", "tp_1")
    assert [shape.ways(p) for p in shape.prefixes()] == [8, 4, 1]


def test_a_plan_mesh_needs_the_plans_devices():
    with pytest.raises(BadMesh, match="has no devices"):
        build.plan_mesh({"tp": 8}, MeshShape((("tp", 8),)))
    small = Mesh(np.array(jax.devices()[:2]), ("tp",))
    with pytest.raises(BadMesh, match="2 devices, the plan 8"):
        build.plan_mesh(small, MeshShape((("tp", 8),)))


@pytest.mark.parametrize(
    ("units", "ways", "legal"),
    [
        ((12,), 8, [1, 2, 3, 4, 6, 12]),  # H7
        ((4, 7), 8, [1, 2, 4, 28]),  # H4: 28 query heads over 4 kv heads
        ((10, 4), 4, [1, 2, 5, 10, 20, 40]),  # H3
        ((1, 8), 8, [1, 2, 4, 8]),  # H8: one kv head
        ((52,), 8, [1, 2, 4, 13, 26, 52]),  # H5
        ((25,), 2, [1, 5, 25]),  # H6
    ],
)
def test_legal_ways_are_those_that_keep_units_whole(units, ways, legal):
    assert legal_ways(units) == legal
    assert splits(units, ways) == (ways in legal)


def test_idle_devices_of_a_small_mesh():
    assert build.idle_devices(Mesh(np.array(jax.devices()[:4]), ("tp",))) == 4
    assert build.idle_devices({"tp": 4}) == 0
