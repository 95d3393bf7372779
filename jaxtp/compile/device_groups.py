"""Which devices take part in a collective, and along which mesh axes.

XLA prints groups in four spellings: lists of lists, `[4,2]<=[2,4]T(1,0)`, and a mesh with axes,
which may carry its own device order and sub-axes (`mesh['a'=8], device_ids=([2,4]T(1,0))
{'a':(2)4}`). The axis names of that mesh are often the compiler's own, so names are always
resolved from the device ids and the user's mesh.
"""

import re
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

Groups = tuple[tuple[int, ...], ...]

_IOTA = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}")
_AXIS = re.compile(r"'?([\w.\-]+)'?=(\d+)")
_AXIS_USE = re.compile(r"'?([\w.\-]+)'?(?::\((\d+)\)(\d+))?")
_LISTS = re.compile(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}")


def device_groups(attributes: str, num_devices: int) -> Groups:
    """The groups of device ids in an instruction's attributes; a permute's are its pairs.

    Args:
        attributes: The instruction's attributes as printed.
        num_devices: Devices that run the program; an empty list of groups means all of them.

    Raises:
        ValueError: If there are no groups in any known spelling.
    """
    if mesh := _MESH.search(attributes):
        return _mesh_groups(*mesh.groups())
    if lists := _LISTS.search(attributes):
        rows = re.findall(r"\{([\d,]*)\}", lists[1])
        return tuple(_numbers(row) for row in rows) or (tuple(range(num_devices)),)
    if iota := re.search(r"replica_groups=(\[\S*)", attributes):
        return _rows(_iota(iota[1]))
    raise ValueError(f"no device groups in {attributes[:200]!r}")


def mesh_axes(groups: Groups, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which the members of a group differ, in mesh order.

    Args:
        groups: Device ids; all groups have the same size.
        mesh: Axis name -> size; devices are numbered with the last axis fastest.

    Raises:
        ValueError: If a device id is not in the mesh.
    """
    coordinates = np.unravel_index(np.array(groups), tuple(mesh.values()))
    return tuple(
        name
        for name, along in zip(mesh, coordinates, strict=True)
        if bool((along != along[:, :1]).any())
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


def _rows(ids: npt.NDArray[np.int64]) -> Groups:
    return tuple(tuple(int(device) for device in row) for row in ids)


def _iota(text: str) -> npt.NDArray[np.int64]:
    """`[4,2]<=[2,4]T(1,0)`: count through [2,4], transpose, lay out as [4,2]."""
    found = _IOTA.match(text)
    if found is None:  # an explicit list of ids
        return np.array(_numbers(text))
    shape = _numbers(found[1])
    source = _numbers(found[2]) if found[2] else shape
    ids = np.arange(int(np.prod(source))).reshape(source)
    if found[3]:
        ids = ids.transpose(_numbers(found[3]))
    return ids.reshape(shape) if found[2] else ids.reshape(-1)


def _mesh_groups(axes: str, order: str | None, used: str) -> Groups:
    sizes = {name: int(size) for name, size in _AXIS.findall(axes)}
    total = int(np.prod(list(sizes.values())))
    rest = dict(zip(sizes, np.unravel_index(np.arange(total), tuple(sizes.values())), strict=True))
    rank = np.zeros(total, np.int64)
    members = 1
    for name, pre, size_text in _AXIS_USE.findall(used):
        # `name:(pre)size` is one digit of the coordinate; a whole axis is its only digit.
        size = int(size_text or sizes[name])
        stride = sizes[name] // (int(pre or 1) * size)
        digit = rest[name] // stride % size
        rest[name] = rest[name] - digit * stride
        rank = rank * size + digit
        members *= size
    # Devices that agree in everything but the digits in use form a group, ranked by those digits.
    key = np.ravel_multi_index(tuple(rest.values()), tuple(sizes.values()))
    ids = _iota(order) if order else np.arange(total)
    return _rows(ids[np.lexsort((rank, key))].reshape(-1, members))
