"""Kernels of a Hugging Face folder quantised as they are read, a layer at a time.

A device holds the floats of one layer's kernel at most, beside what it keeps.
"""

import functools
from collections.abc import Callable, Collection, Mapping

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding

from jaxtp.io.assemble import ParameterSource
from jaxtp.models import Decoder
from jaxtp.models.quantized import SCALES, VALUES, quantized, stack_names
from jaxtp.placement.train_state import Slot
from jaxtp.plan.specs import partition_spec
from jaxtp.plan.trees import flatten


def alone(
    sources: Mapping[str, ParameterSource], stacked: Decoder, model: Decoder
) -> dict[str, ParameterSource]:
    """What each parameter of a quantised model is made of; scales are made with their kernels.

    Args:
        sources: The same of the float model.
        stacked: That one, or its shapes.
        model: The quantised one, or its shapes.
    """
    names, held = stack_names(stacked), flatten(model).keys()
    found: dict[str, ParameterSource] = {}
    for path, source in sources.items():
        name, _, rest = path.partition("/")
        if name not in names:
            found[_path(path, held)] = source
            continue
        for layer in range(len(source.tensors)):
            one = np.empty(source.tensors.shape[1:], object)
            one[...] = source.tensors[layer]
            storage = source.storage._replace(stack=one.shape)
            found[_path(f"{name}/{layer}/{rest}", held)] = ParameterSource(one, storage)
    return found


def _path(path: str, held: Collection[str]) -> str:
    return path + VALUES if path + VALUES in held else path


def place_kernel(
    path: str, array: jax.Array, places: Mapping[str, Slot], mesh: Mesh, kind: str
) -> dict[str, jax.Array]:
    """What becomes of a parameter that has been read: integers and scales, or what it is.

    Args:
        path: The parameter's, or that of a kernel's integers.
        array: Floats, where the integers will lie.
        places: The slot of every parameter.
        mesh: The plan's mesh.
        kind: "int8" or "int4".
    """
    if not path.endswith(VALUES):
        return {path: array}
    scales = path.removesuffix(VALUES) + SCALES
    one = places[scales].stored
    outputs = tuple(d for d, size in enumerate(array.shape) if one[d] == size)
    sharding = NamedSharding(mesh, partition_spec(places[scales].spec))
    values, scale = _quantizer(outputs, kind, array.sharding, sharding)(array)
    array.delete()
    return {path: values, scales: scale}


@functools.cache
def _quantizer(
    outputs: tuple[int, ...], kind: str, values: Sharding, scales: Sharding
) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
    make = functools.partial(quantized, outputs=outputs, kind=kind)
    return jax.jit(make, out_shardings=(values, scales))
