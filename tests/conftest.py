"""The harness simulates eight devices by itself; no test depends on the caller's environment."""

import gc
import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["JAX_PLATFORMS"] = "cpu"
# Numbers are held to the unsharded program under the same compiler; half of its time is LLVM's.
# Here rather than by `jax.config`, so that programs which tests start have it too.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
# XLA's threads for CPU devices. A collective that waits holds one, and with jax 0.10 a device may
# have several waiting: with as many threads as devices, which is what few cores get, none is left
# for the device that they wait for.
os.environ["NPROC"] = "64"

import jax
import pytest
from default_rows import split
from hypothesis import HealthCheck, settings

jax.config.update("jax_num_cpu_devices", 8)  # refused once a backend exists, so it stands here
jax.config.update("jax_numpy_rank_promotion", "raise")

# Tracing makes objects by the million, few of them in circles: a tenth of the suite's time was
# spent looking for these.
gc.set_threshold(50_000, 20, 20)

# How long an example takes is a matter of the machine, and of what the first of a process imports.
settings.register_profile(
    "jaxtp", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("jaxtp")


def pytest_addoption(parser):
    parser.addoption("--every-row", action="store_true", help="all rows of the large tables")


@pytest.hookimpl(tryfirst=True)  # before -k, so that all rows are seen
def pytest_collection_modifyitems(config, items):
    if any("::" in arg for arg in config.args):
        return  # who names a test gets it
    named = {
        item: (item.originalname, item.callspec.id if hasattr(item, "callspec") else "")
        for item in items
        if hasattr(item, "originalname")
    }
    rows = {}
    for function, row in named.values():
        rows.setdefault(function, set()).add(row)
    try:
        beyond = split(rows)
    except LookupError as err:
        raise pytest.UsageError(err) from err
    if not config.getoption("--every-row"):
        left = [item for item in items if named.get(item) in beyond]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if named.get(item) not in beyond]


def pytest_collection_finish():
    gc.freeze()  # modules and tests live to the end
