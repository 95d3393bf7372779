"""Starting JAX where there is no GPU, without what it says about that.

In: nothing. Out: whether this machine has a GPU that JAX would use, and JAX kept to the CPU.
"""

import importlib
import importlib.util
import os
import pkgutil
import sys
import tempfile
from pathlib import Path


def has_no_gpu() -> bool:
    """Whether JAX knows accelerators by its CUDA plugin alone, and there is no NVIDIA GPU here."""
    plugins = importlib.util.find_spec("jax_plugins")
    folders = plugins.submodule_search_locations if plugins is not None else None
    names = [module.name for module in pkgutil.iter_modules(folders or [])]
    if not names or any(not name.startswith("xla_cuda") for name in names):
        return False
    drivers = map(Path, ("/dev/nvidiactl", "/dev/dxg"))  # on Linux, and in Windows' Linux
    return importlib.util.find_spec("libtpu") is None and not any(d.exists() for d in drivers)


def keep_to_the_host(*, start: bool) -> None:
    """Starts no GPU, of which nothing is asked.

    Where the CUDA plugin is installed for its compiler and CUDA is not, JAX would else print a
    traceback about cuDNN or cuFFT, and XLA that it found no driver, which it does in jaxlib 0.10
    whatever the log level.

    Args:
        start: Whether JAX is started too, quietly.
    """
    if "jax" in sys.modules:
        return
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    if not start:
        return
    start_quietly()


def start_quietly() -> None:
    """Starts JAX, whose words about what it did not find are printed only if it fails."""
    with tempfile.TemporaryFile() as kept:
        terminal = os.dup(2)
        os.dup2(kept.fileno(), 2)
        try:
            importlib.import_module("jax").devices()
        except BaseException:
            kept.seek(0)
            os.write(terminal, kept.read())
            raise
        finally:
            os.dup2(terminal, 2)
            os.close(terminal)
