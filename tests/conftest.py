"""The harness simulates eight devices by itself; no test depends on the caller's environment."""

import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax

jax.config.update("jax_num_cpu_devices", 8)  # refused once a backend exists, so it stands here
jax.config.update("jax_numpy_rank_promotion", "raise")
