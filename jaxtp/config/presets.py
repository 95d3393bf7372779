"""A preset is a `Config` with a name: the run of a published model on one host of H100s."""

from typing import Any

from jaxtp.config.files import changed
from jaxtp.config.settings import Batch, Config, Mesh, Tensor


def preset(model: str, **changes: Any) -> Config:
    """The run that `jaxtp preflight --model` compiles: tp 8 on `h100:1x8`, block outputs kept.

    What the plan has to replicate is noted and not refused (`tensor.strict` is off).

    Args:
        model: A name in `jaxtp.models.PRESETS`.
        **changes: Settings by their dotted names, see `changed`.

    Raises:
        BadConfig: TP020, for a setting that is unknown or cannot have the value.

    >>> preset("llama3-8b", **{"mesh.tp": 4}).mesh.tp
    4
    """
    base = Config(
        model=model,
        seq_len=2048,
        remat="block_outputs",
        target="h100:1x8",
        mesh=Mesh(tp=8),
        batch=Batch(size=8),
        tensor=Tensor(strict=False),
    )
    return changed(base, changes)
