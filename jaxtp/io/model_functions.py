"""`package.module:function`: anybody's model, as a function of theirs returns it."""

import dataclasses
import importlib
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxtp.errors import BadUsage, JaxtpError
from jaxtp.plan.trees import PyTree, as_pytree, flatten, leaves, shape_dtype

RETURNS = "name a function without arguments that returns (fn, params, inputs)"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OwnModel:
    """A model that is known by its function alone; the arguments of `make_plan`.

    Attributes:
        name: What tables call it.
        fn: `fn(params, *inputs)`, a Linen module, or None where `params` is an `nnx.Module`.
        params: Its parameters: arrays or structs.
        inputs: What it is traced on: trees of arrays or structs.
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
        BadUsage: TP132, if the function cannot be had, fails, or does not return three things, the
            last a tuple or list.
        BadTree: TP046, for parameters or inputs that are no trees of arrays, structs and numbers.
        JaxtpError: What the function itself raises of jaxtp's errors.
    """
    text = given if isinstance(given, str) else _entry(given)
    sys.path.insert(0, "")  # as `python -m` does
    try:
        fn, params, inputs = (_imported(given) if isinstance(given, str) else given)()
    except JaxtpError:
        raise
    except Exception as err:  # whatever their code raises
        fix = f"{RETURNS}; {otherwise}" if otherwise else RETURNS
        what = f"it gives no model: {type(err).__name__}: {err}{_line(err)}"
        raise BadUsage(what, where=text or repr(given), fix=fix) from err
    finally:
        sys.path.remove("")
    name = text or getattr(given, "__name__", "model")
    _check(params, inputs, name)
    params, inputs = _as_arrays(params), _as_arrays(inputs)
    return OwnModel(name=name, fn=fn, params=params, inputs=inputs, entry=text)


def _line(err: Exception) -> str:
    """Where their code failed, as ` (file:line)`; "" if none of it ran."""
    ways_here = (__file__, str(importlib.__file__), "<frozen")
    frames = traceback.extract_tb(err.__traceback__)
    frames = [frame for frame in frames if not frame.filename.startswith(ways_here)]
    # Their own line says more than one of JAX that it ended in.
    python = sysconfig.get_paths()
    installed = (python["stdlib"], python["purelib"])
    own = [frame for frame in frames if not frame.filename.startswith(installed)]
    return "".join(f" ({frame.filename}:{frame.lineno})" for frame in (own or frames)[-1:])


def _check(params: Any, inputs: Any, name: str) -> None:
    """Refuses what no model is called with, before anything is traced."""
    if not isinstance(inputs, tuple | list):
        raise BadUsage(
            f"its inputs are a {type(inputs).__name__}",
            where=name,
            fix="a tuple of the arguments after the parameters: (fn, params, (x,))",
        )
    flatten(params)
    for path, leaf in leaves(inputs):
        shape_dtype(leaf, f"inputs/{path}")


def _as_arrays(tree: PyTree) -> PyTree:
    """The tree with arrays for its numbers, as all code behind here may ask leaves for a shape."""
    plain, rebuild = as_pytree(tree)
    if all(hasattr(leaf, "shape") for leaf in jax.tree.leaves(plain)):
        return tree
    return rebuild(jax.tree.map(lambda x: x if hasattr(x, "shape") else jnp.asarray(x), plain))


def _imported(text: str) -> Callable[[], Any]:
    module, _, name = text.partition(":")
    return getattr(importlib.import_module(module), name)


def _entry(given: Callable[[], Any]) -> str:
    """Where another process finds a function; "" for one of a script or inside of another."""
    module, name = getattr(given, "__module__", ""), getattr(given, "__qualname__", "")
    found = getattr(sys.modules.get(module), name, None)
    return f"{module}:{name}" if found is given and module != "__main__" else ""
