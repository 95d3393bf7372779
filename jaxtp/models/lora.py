"""Low-rank adapters of our models' linear maps: `y = x W + scale (x A) B` (LoRA, Hu et al. 2021).

A config with `lora` set describes a model with adapters; `build`, plans, preflight and training
follow it. A has the kernel's input dims and the rank, B the rank and its output dims; both have the
leading dims of stacked layers. They are `nnx.LoRAParam`s, as Flax's own are, beside the kernel.
Flax's `nnx.LoRA` itself takes flat features only, and our kernels keep heads apart.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtp.errors import BadConfig, join
from jaxtp.models.projections import Linear
from jaxtp.models.quantized import is_quantized
from jaxtp.plan.trees import leaves

FACTORS = ("lora_a", "lora_b")
"""The adapter's parameters: the last parts of their paths."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """Which linear maps have adapters, and of what size.

    Raises:
        BadConfig: TP020, if the rank is below 1 or there are no targets.
    """

    rank: int
    """Width between A and B."""

    alpha: float
    """The product of A and B is multiplied by `alpha / rank`."""

    targets: tuple[str, ...]
    """Names of linear maps, such as `q_proj`; every layer's are meant."""

    def __post_init__(self) -> None:
        if self.rank < 1 or not self.targets:
            raise BadConfig(
                f"an adapter of rank {self.rank} for {join(self.targets) or 'no module'}",
                where="lora",
                fix="a rank of 1 or more, and targets such as q_proj, v_proj",
            )

    @property
    def scale(self) -> float:
        """What the product of A and B is multiplied by."""
        return self.alpha / self.rank


def is_adapter(path: str) -> bool:
    """Whether a parameter is a factor of an adapter: what LoRA trains."""
    return path.rpartition("/")[2] in FACTORS


def add_adapters(model: nnx.Module, lora: Lora, rngs: nnx.Rngs) -> None:
    """Gives every target a random A and a zero B: the model computes what it did.

    A is uniform with variance 1 / (3 x inputs), B zero, as PEFT initialises them.

    Raises:
        BadConfig: TP020, if a target is no linear map of the model.
    """
    linears = dict(_linears(model))
    missing = set(lora.targets) - linears.keys()
    if missing:
        raise BadConfig(
            f"no linear map is called {join(sorted(missing))}",
            where="lora.targets",
            fix=f"of {join(linears, 20)}",
        )
    for name in lora.targets:
        for linear in linears[name]:
            _add(linear, lora, rngs)


def _add(linear: Linear, lora: Lora, rngs: nnx.Rngs) -> None:
    stack, inputs, outputs = dims_of(linear)
    bound = 1 / math.sqrt(math.prod(inputs))
    a_shape, b_shape = (*stack, *inputs, lora.rank), (*stack, lora.rank, *outputs)
    key, dtype = rngs.params(), linear.param_dtype
    linear.lora_a = nnx.LoRAParam(jax.random.uniform(key, a_shape, dtype, -bound, bound))
    linear.lora_b = nnx.LoRAParam(jnp.zeros(b_shape, dtype))
    linear.lora_scale = lora.scale


def dims_of(linear: Linear) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Sizes of the kernel's stacked dims, input dims and output dims, in elements."""
    shape = linear.kernel.shape
    outputs = len(shape) - len(linear.out_features)
    stack = outputs - len(linear.in_features)
    return shape[:stack], shape[stack:outputs], shape[outputs:]


def _linears(model: nnx.Module) -> Iterator[tuple[str, list[Linear]]]:
    """Name -> the linear maps called so. Experts' are read as stacks of matrices, and left out."""
    found: dict[str, list[Linear]] = {}
    for path, module in nnx.iter_modules(model):
        if isinstance(module, Linear) and path and "experts" not in path:
            found.setdefault(str(path[-1]), []).append(module)
    yield from found.items()


def merge_lora(model: nnx.Module) -> nnx.State:
    """Adds every adapter to its kernel and takes it out of the model, in place.

    Returns:
        The adapters, for `unmerge_lora`. Arrays stay where they are.

    Raises:
        BadConfig: TP020, if the model has no adapter, or kernels are integers.
    """
    config: Any = getattr(model, "config", None)
    if getattr(config, "lora", None) is None:
        raise BadConfig("the model has no adapter", where="model", fix="load_hf(..., adapter=)")
    if is_quantized(config):
        raise BadConfig(
            f"the kernels are {config.quantize}, to which nothing is added",
            where="model",
            fix="merge first, and quantise the result; or leave adapters beside their kernels",
        )
    adapters = nnx.state(model, nnx.LoRAParam)
    for linear in _adapted(model):
        _fold(linear, 1.0)
    for linear in _adapted(model):
        del linear.lora_a, linear.lora_b, linear.lora_scale
    _configure(model, None)
    return adapters


def unmerge_lora(model: nnx.Module, adapters: nnx.State, lora: Lora) -> None:
    """Takes merged adapters out of the kernels again and puts them beside, in place.

    Kernels are as they were up to one rounding to their type at the merge and one here.

    Args:
        model: A model after `merge_lora`.
        adapters: What `merge_lora` returned.
        lora: The adapters' settings: `model.config.lora` before the merge.
    """
    factors = dict(leaves(adapters))
    for path, module in nnx.iter_modules(model):
        a, b = (factors.get("/".join(map(str, (*path, factor)))) for factor in FACTORS)
        if isinstance(module, Linear) and a is not None and b is not None:
            module.lora_a, module.lora_b = nnx.LoRAParam(a), nnx.LoRAParam(b)
            module.lora_scale = lora.scale
    for linear in _adapted(model):
        _fold(linear, -1.0)
    _configure(model, lora)


def _adapted(model: nnx.Module) -> Iterator[Linear]:
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Linear) and module.lora_a is not None:
            yield module


def _fold(linear: Linear, sign: float) -> None:
    """The kernel with `sign` times its adapter added, in float32, where it lies."""
    num_stacked = len(dims_of(linear)[0])
    kernel = linear.kernel[...]

    def add(kernel: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = (w.astype(jnp.float32) for w in (a, b))
        product = a.reshape(*a.shape[:num_stacked], -1, a.shape[-1]) @ b.reshape(
            *b.shape[: num_stacked + 1], -1
        )
        change = sign * linear.lora_scale * product.reshape(kernel.shape)
        return (kernel.astype(jnp.float32) + change).astype(kernel.dtype)

    assert linear.lora_a is not None
    assert linear.lora_b is not None
    folded = jax.jit(add, out_shardings=getattr(kernel, "sharding", None))
    linear.kernel[...] = folded(kernel, linear.lora_a[...], linear.lora_b[...])


def _configure(model: nnx.Module, lora: Lora | None) -> None:
    """Configs that the model and its parts hold say whether there are adapters."""
    for _, module in nnx.iter_modules(model):
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "lora"):
            setattr(module, "config", dataclasses.replace(config, lora=lora))  # noqa: B010
