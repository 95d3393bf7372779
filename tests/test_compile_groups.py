"""Every spelling of device groups, from compiled text and from XLA's grammar."""

import numpy as np
import pytest

from jaxtp.compile.device_groups import device_groups, mesh_axes

TP = ((0, 1, 2, 3), (4, 5, 6, 7))
DP = ((0, 4), (1, 5), (2, 6), (3, 7))
MESH = {"dp": 2, "tp": 4}


@pytest.mark.parametrize(
    ("text", "groups", "axes"),
    [
        # Spellings that both jax versions print for the programs of tests/data/hlo.
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", TP, ("tp",)),
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", DP, ("dp",)),
        ("replica_groups=[2,4]<=[8]", TP, ("tp",)),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", DP, ("dp",)),
        ("replica_groups=mesh['dp'=2,'tp'=4] {'tp'}", TP, ("tp",)),
        ("replica_groups=mesh['dp'=2,'tp'=4] {'dp','tp'}", (tuple(range(8)),), ("dp", "tp")),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=1,'axis_2'=4] {'axis_0'}", DP, ("dp",)),
        (
            "replica_groups=mesh['axis_0'=4,'axis_1'=1,'axis_2'=2], device_ids=([2,4]T(1,0)) "
            "{'axis_0'}",
            TP,
            ("tp",),
        ),
        ("channel_id=1, source_target_pairs={{0,1},{1,0}}, x={}", ((0, 1), (1, 0)), ("tp",)),
        # Spellings that only XLA's printer shows.
        ("replica_groups=mesh[a=2,b=4] {a}", DP, ("dp",)),
        ("replica_groups=mesh['x'=8] {'x':(2)4}", TP, ("tp",)),
        ("replica_groups=mesh['x'=8] {'x':(1)2}", DP, ("dp",)),
        (
            "replica_groups=mesh['x'=8] {'x':(1)2,'x':(4)2}",
            ((0, 1, 4, 5), (2, 3, 6, 7)),
            ("dp", "tp"),
        ),
        ("replica_groups=mesh['x'=2,'y'=4], device_ids=(0,2,4,6,1,3,5,7) {'y'}",
         ((0, 2, 4, 6), (1, 3, 5, 7)), ("dp", "tp")),
        ("replica_groups={}, to_apply=%add", (tuple(range(8)),), ("dp", "tp")),
    ],
)  # fmt: skip
def test_spelling(text, groups, axes):
    found = device_groups(f"channel_id=1, {text}, use_global_device_ids=true", 8)
    assert found == groups
    assert mesh_axes(found, MESH) == axes


def test_axes_of_a_large_mesh():
    mesh = {"dp": 32, "ep": 2, "tp": 8}
    found = device_groups("replica_groups=[16,32]<=[32,16]T(1,0)", 512)
    assert (len(found), len(found[0])) == (16, 32)
    assert mesh_axes(found, mesh) == ("dp",)
    assert mesh_axes(device_groups("replica_groups=[32,16]<=[512]", 512), mesh) == ("ep", "tp")


def test_order_inside_a_group_follows_the_axes():
    forward = device_groups("replica_groups=mesh['a'=2,'b'=2] {'a','b'}", 4)
    swapped = device_groups("replica_groups=mesh['a'=2,'b'=2] {'b','a'}", 4)
    assert forward == ((0, 1, 2, 3),)
    assert swapped == ((0, 2, 1, 3),)


def test_sub_axes_partition_the_devices():
    for text in ("'x':(1)3", "'x':(3)2", "'x':(2)3", "'y','x':(6)2"):
        groups = device_groups(f"replica_groups=mesh['x'=12,'y'=2] {{{text}}}", 24)
        assert sorted(np.array(groups).ravel()) == list(range(24)), text


def test_no_groups():
    with pytest.raises(ValueError, match="no device groups"):
        device_groups("channel_id=1", 8)
    with pytest.raises(ValueError, match="out of bounds"):
        mesh_axes(((0, 9),), MESH)
