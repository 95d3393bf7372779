"""Weight-only quantisation: kernels as integers, and a float32 scale for each of their outputs.

Values and scales are qwix's. The product is ours: qwix multiplies a kernel by its scales first, for
which XLA writes the layer's matrix in 16 bits and reads that; here the integers are an operand of
the product, which turns them into floats as it reads them, and its outputs are scaled. XLA reads an
operand of such a product in place only if it is an array of its own, so layers are not stacked.
"""

import dataclasses
import types
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtp.errors import BadConfig
from jaxtp.models.projections import Linear, QuantizedKernel

VALUES, SCALES = "/qvalue", "/scale"
"""What follows the path of a kernel in those of its integers and scales."""


def quantize(model: Any, kind: str) -> Any:
    """The model with the kernels of its linear maps, the head's too, as integers; for generation.

    Token tables, norms, biases, routers and adapters stay as they are, a head that is the table
    with it. A scale belongs to an output, of experts to an output of each of them. Each layer
    becomes a module of its own, so that a second model is made: `layers/3/mlp/...`.

    Args:
        model: A `Decoder` with float parameters, stacked as `models.build` makes it. Arrays that
            are placed stay on their devices; place the result by `jaxtp.shard`, whose plan of it
            has scales too.
        kind: "int8" or "int4": a value has so many bits, and is the kernel over its scale, rounded.
            The largest of an output is 127.5 or 7.5 scales.

    Raises:
        BadConfig: TP020, if qwix is not installed, for another kind, what is no model of jaxtp, or
            one that is quantised.
    """
    if not hasattr(getattr(model, "config", None), "caches_latents"):
        raise BadConfig(
            f"a {type(model).__name__} is no model of jaxtp",
            where="model",
            fix="what models.build or load_hf returns",
        )
    check_kind(kind)
    if is_quantized(model.config):
        raise BadConfig(
            f"the model's kernels are {model.config.quantize}",
            where="quantize",
            fix="a float model",
        )
    model = nnx.clone(model)
    for name in stack_names(model):
        layers = getattr(model, name)
        graph, params = nnx.split(layers)
        count = len(jax.tree.leaves(params)[0])
        alone = [nnx.merge(graph, jax.tree.map(lambda x: x[i], params)) for i in range(count)]  # noqa: B023
        setattr(model, name, nnx.List(alone))
    modules = [module for _, module in nnx.iter_modules(model)]
    # Small, and a choice of experts that changes is a larger error than any rounding.
    routers = [getattr(module, "router", None) for module in modules]
    for module in modules:
        if isinstance(module, Linear) and not any(module is router for router in routers):
            kernel = module.kernel[...]
            last = kernel.ndim - len(module.out_features)
            summed = range(last - len(module.in_features), last)
            outputs = tuple(d for d in range(kernel.ndim) if d not in summed)
            values, scales = quantized(kernel, outputs, kind)
            setattr(module, "kernel", QuantizedKernel(values, scales))  # noqa: B010
    for _, module in nnx.iter_modules(model):
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "quantize"):
            setattr(module, "config", dataclasses.replace(config, quantize=kind))  # noqa: B010
    return model


def stack_names(model: Any) -> list[str]:
    """Attributes of a model that hold stacked layers."""
    return [name for name, held in vars(model).items() if any(held is one for one in model.stacks)]


def is_quantized(config: Any) -> bool:
    """Whether a config describes a model with integer kernels."""
    return getattr(config, "quantize", "none") != "none"


def check_kind(kind: str) -> None:
    """Refuses an unknown type, before anything is read or compiled.

    Raises:
        BadConfig: TP020, see `quantize`.
    """
    if kind not in ("int8", "int4"):
        raise BadConfig(f"{kind!r} is no type of weights", where="quantize", fix="int8 or int4")
    _qwix()


def quantized(kernel: jax.Array, outputs: tuple[int, ...], kind: str) -> tuple[Any, Any]:
    """Integers like the kernel, and float32 scales with 1 in place of each dim that is summed over.

    The largest of what makes an output is 127.5 (7.5) scales, values are rounded: qwix's absmax.

    Args:
        kernel: Any float type.
        outputs: Its dims that are not summed over.
        kind: "int8" or "int4".
    """
    found = _qwix().quantize(kernel.astype(jnp.float32), kind, channelwise_axes=outputs)
    return found.qvalue, found.scale


def _qwix() -> types.ModuleType:
    try:
        import qwix
    except ImportError:
        raise BadConfig(
            "qwix is not installed", where="quantize", fix='pip install "jaxtp[quantize]"'
        ) from None
    return qwix
