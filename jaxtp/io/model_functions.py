"""`package.module:function`: anybody's model, as a function of theirs returns it."""

import dataclasses
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from jaxtp.errors import BadUsage
from jaxtp.plan.trees import PyTree

RETURNS = "name a function without arguments that returns (fn, params, inputs)"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OwnModel:
    """A model that is known by its function alone; the arguments of `make_plan`.

    Attributes:
        name: What tables call it.
        fn: `fn(params, *inputs)`, a Linen module, or None where `params` is an `nnx.Module`.
        params: Its parameters: arrays or structs.
        inputs: What it is traced on.
        entry: "package.module:function" that returns the three in any process; "" if none does.
    """

    name: str
    fn: Any
    params: PyTree
    inputs: Sequence[Any]
    entry: str = ""


def is_model_function(text: str) -> bool:
    """Whether a word is `package.module:function`."""
    module, colon, name = text.partition(":")
    return bool(colon) and name.isidentifier() and all(map(str.isidentifier, module.split(".")))


def own_model(given: str | Callable[[], Any], *, otherwise: str = "") -> OwnModel:
    """The model that a function without arguments returns.

    Args:
        given: The function, or where it is: "package.module:function", also found from the working
            directory.
        otherwise: What else would do, for the error.

    Raises:
        BadUsage: TP132, if the function cannot be had or does not return three things.
    """
    text = given if isinstance(given, str) else _entry(given)
    sys.path.insert(0, "")  # as `python -m` does
    try:
        fn, params, inputs = (_imported(given) if isinstance(given, str) else given)()
    except (ImportError, AttributeError, TypeError, ValueError) as err:
        fix = f"{RETURNS}; {otherwise}" if otherwise else RETURNS
        raise BadUsage(f"it gives no model: {err}", where=text or repr(given), fix=fix) from err
    finally:
        sys.path.remove("")
    name = text or getattr(given, "__name__", "model")
    return OwnModel(name=name, fn=fn, params=params, inputs=inputs, entry=text)


def _imported(text: str) -> Callable[[], Any]:
    module, _, name = text.partition(":")
    return getattr(importlib.import_module(module), name)


def _entry(given: Callable[[], Any]) -> str:
    """Where another process finds a function; "" for one of a script or inside of another."""
    module, name = getattr(given, "__module__", ""), getattr(given, "__qualname__", "")
    found = getattr(sys.modules.get(module), name, None)
    return f"{module}:{name}" if found is given and module != "__main__" else ""
