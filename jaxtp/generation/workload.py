"""What is asked of a model that generates, and its plan."""

import dataclasses
from typing import Any, Literal

from jaxtp import models
from jaxtp.errors import BadConfig, BadTarget
from jaxtp.mesh.axes import Axis
from jaxtp.plan.decisions import Plan
from jaxtp.rules.planner import make_plan


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is asked of a model.

    Attributes:
        model: A preset, such as llama3-70b.
        tp: Devices along the tensor axis; what is left of the target is dp.
        batch: Rows, over all replicas.
        context: Tokens of a prompt and its answer: slots of the cache.
        new_tokens: How many of them are the answer's.
        layers: Layers to compile; 0 is all of them.
        dtype: Type of weights, activations and cache.
        quantize: Type of kernels: none, int8 or int4; see `jaxtp.models.quantize`.
        temperature: 0 takes the likeliest token.
        top_k: As in `jaxtp.generate`.
        top_p: Likewise.
    """

    model: str
    tp: int = 8
    batch: int = 16
    context: int = 8192
    new_tokens: int = 256
    layers: int = 0
    dtype: str = "bfloat16"
    quantize: Literal["none", "int8", "int4"] = "none"
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        problems = {
            "tp": self.tp < 1,
            "batch": self.batch < 1,
            "new_tokens": self.new_tokens < 1,
            "context": self.context <= self.new_tokens,
        }
        for name, is_wrong in problems.items():
            if is_wrong:
                raise BadConfig(
                    f"{name} is {getattr(self, name)}",
                    where=name,
                    fix="1 or more; a context has the prompt beside its new tokens",
                )

    @property
    def weights(self) -> str:
        """Types of kernels and of what is computed with, as a report says it."""
        return self.dtype if self.quantize == "none" else f"{self.quantize} kernels, {self.dtype}"

    @property
    def config(self) -> models.Config:
        """The model's."""
        found = models.config_of(self.model)
        types: dict[str, Any] = {"param_dtype": self.dtype, "dtype": self.dtype}
        types["quantize"] = self.quantize
        return dataclasses.replace(found.of_depth(self.layers), **types)

    def plan(self, num_devices: int) -> Plan:
        """The plan on so many devices.

        Raises:
            BadTarget: TP116, if tp does not divide them, or the replicas do not divide the batch.
        """
        dp, rest = divmod(num_devices, self.tp)
        if rest or self.batch % dp:
            raise BadTarget(
                f"{num_devices} devices and {self.batch} rows with tp={self.tp}",
                where="tp",
                fix="tp divides the devices, and what is left of them divides the batch",
            )
        sizes = {Axis.DP.value: dp} if dp > 1 else {}
        sizes[Axis.TP.value] = self.tp
        config = self.config
        return make_plan(models.abstract(config), sizes, config=config, pad_vocab=True)
