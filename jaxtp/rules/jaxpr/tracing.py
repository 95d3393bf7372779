"""Tracing a model where the GPU's libraries are missing."""

import contextlib
import contextvars
import functools
import importlib
import threading
from collections.abc import Callable, Generator
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage] (0.12: Jaxpr)

CHECKS = "jax._src.cudnn.fused_attention_stablehlo"
"""Where JAX asks for cuDNN while it traces, not when it compiles."""

_planning = contextvars.ContextVar("planning", default=False)
_lock = threading.Lock()


def forward(fn: Callable[..., Any], *args: Any) -> ClosedJaxpr:
    """The jaxpr of a call, also of attention that asks for cuDNN where there is none.

    JAX looks for cuDNN while tracing, so that a GPU model could not be planned on a laptop. What
    the trace answers instead is never compiled.
    """
    try:
        return jax.make_jaxpr(fn)(*args)
    except (RuntimeError, NotImplementedError) as error:
        if "cuDNN" not in str(error) and not isinstance(error, NotImplementedError):
            raise
    with _without_cudnn():
        return jax.make_jaxpr(fn)(*args)


@contextlib.contextmanager
def _without_cudnn() -> Generator[None]:
    """Answers JAX's checks for cuDNN, in this context only.

    The checks are wrapped once, on first need, and the wrappers do what they wrap unless this
    context, which no other thread shares, is planning. Nothing is put back, so nothing can be put
    back too early; and a model that imported `dot_product_attention` by name is served too.
    """
    module = importlib.import_module(CHECKS)
    with _lock:
        for name, answer in (("check_cudnn_version", 99999), ("check_is_flash_attention", None)):
            check = getattr(module, name)
            if not hasattr(check, "asks_when_planning"):
                setattr(module, name, _answered(check, answer))
    token = _planning.set(True)
    try:
        yield
    finally:
        _planning.reset(token)


def _answered(check: Callable[..., Any], answer: Any) -> Callable[..., Any]:
    @functools.wraps(check)
    def asked(*args: Any, **kwargs: Any) -> Any:
        return answer if _planning.get() else check(*args, **kwargs)

    asked.asks_when_planning = True  # pyright: ignore[reportFunctionMemberAccess, reportAttributeAccessIssue]
    return asked
