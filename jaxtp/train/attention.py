"""Which kernel of attention a run uses: cuDNN's wherever it can, and why not where it cannot."""

import dataclasses
import importlib.util

from jaxtp.config.settings import Config
from jaxtp.errors import BadConfig
from jaxtp.models.attention import cudnn_obstacle
from jaxtp.train.planning import published_of

PACKAGE = "nvidia.cudnn"

NOT_INSTALLED = 'cuDNN\'s library is not installed (pip install "jaxtp[cudnn]")'
"""Why a compiler without a GPU takes XLA's attention where a GPU would take cuDNN's."""


def choose_attention(config: Config, *, on_gpu: bool, ahead: bool = False) -> tuple[Config, str]:
    """The same settings with `attention` either xla or cudnn, and one line that says why.

    Args:
        config: Resolved settings.
        on_gpu: Whether the step runs on NVIDIA GPUs, or is compiled for them.
        ahead: Whether it is compiled without a GPU, for which XLA needs cuDNN's library as a wheel.

    Raises:
        BadConfig: TP020, if cuDNN's is asked for where there is no GPU, in float32, or ahead while
            its library is not installed.
    """
    if config.attention == "cudnn" and not on_gpu:
        raise BadConfig(
            "cuDNN computes attention on NVIDIA GPUs, and this run has none",
            where="attention",
            fix='attention = "auto" or "xla"',
        )
    if config.attention == "cudnn" and config.precision.compute == "float32":
        raise BadConfig(
            "cuDNN's attention takes 16-bit types, and precision.compute is float32",
            where="attention",
            fix='precision.compute = "bfloat16", or attention = "auto" or "xla"',
        )
    if ahead and config.attention == "cudnn" and not has_cudnn():
        raise BadConfig(
            "attention by cuDNN is compiled with cuDNN's library, which is not installed",
            where="attention",
            fix='pip install "jaxtp[cudnn]", or attention = "xla"',
        )
    if config.attention != "auto":
        return config, f"{config.attention}, as asked for"
    why = obstacle(config) if on_gpu else "there is no GPU"
    if not why and ahead and not has_cudnn():
        why = NOT_INSTALLED
    kernel = "xla" if why else "cudnn"
    text = f"xla: {why}" if why else "cudnn, which keeps no tokens x tokens arrays"
    return dataclasses.replace(config, attention=kernel), text


def has_cudnn() -> bool:
    """Whether cuDNN's library is installed as a Python package."""
    try:
        return importlib.util.find_spec(PACKAGE) is not None
    except ModuleNotFoundError:  # the namespace package itself is missing
        return False


def obstacle(config: Config) -> str:
    """Why cuDNN cannot compute a run's attention; "" if it can."""
    if why := cudnn_obstacle(published_of(config), config.precision.compute, config.mesh.tp):
        return why
    if config.data.packed and config.seq_len % 2:
        return f"cuDNN takes masks of an even number of tokens, not {config.seq_len}"
    return ""
