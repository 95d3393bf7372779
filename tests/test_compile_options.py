"""Compile options: spelled for this jaxlib, never fatal."""

import jax
import pytest

from jaxtp.compile.options import FUSED_BYTES, OVERLAP, PREFLIGHT, compile_options, describe, probe
from jaxtp.errors import BadOption
from jaxtp.hardware.links import MIB

ALL_REDUCE = "xla_gpu_all_reduce_combine_threshold_bytes"
SELECTIVE = "xla_gpu_experimental_enable_selective_memcpy_overlap"
HAS_SELECTIVE = jax.__version_info__ >= (0, 11, 2)


@pytest.mark.parametrize("overlap", OVERLAP)
@pytest.mark.parametrize("gradient_fusion", [False, True, 64 * MIB])
def test_every_setting_compiles_here(overlap, gradient_fusion):
    made = compile_options(overlap=overlap, gradient_fusion=gradient_fusion)
    jax.jit(lambda x: x + 1).lower(1.0).compile(dict(made.options))
    asked = {**made.options, **made.unknown}
    assert OVERLAP[overlap].items() <= asked.items()


@pytest.mark.parametrize(
    ("gradient_fusion", "num_bytes"), [(False, 0), (True, FUSED_BYTES), (12345, 12345)]
)
def test_gradient_fusion_sets_every_threshold(gradient_fusion, num_bytes):
    options = compile_options(gradient_fusion=gradient_fusion).options
    thresholds = [value for name, value in options.items() if "combine_threshold" in name]
    assert thresholds == [num_bytes] * 3


def test_an_option_of_a_newer_jaxlib_is_left_out_and_reported():
    made = compile_options(overlap="aggressive")
    assert (SELECTIVE in made.options) == HAS_SELECTIVE
    assert (SELECTIVE in made.unknown) != HAS_SELECTIVE
    assert made.options["xla_gpu_memory_limit_slop_factor"] == 1000


def test_unknown_names_are_reported_not_raised():
    made = compile_options(extra={"xla_gpu_no_such_thing": 1})
    assert made.unknown == {"xla_gpu_no_such_thing": 1}
    assert "unknown to this jaxlib: xla_gpu_no_such_thing" in describe(made)


def test_extra_options_win():
    made = compile_options(gradient_fusion=False, extra={ALL_REDUCE: 7})
    assert made.options[ALL_REDUCE] == 7


@pytest.mark.parametrize(
    "arguments",
    [
        {"overlap": "fast"},
        {"gradient_fusion": -1},
        {"extra": {"xla_gpu_memory_limit_slop_factor": "much"}},
        {"extra": {"xla_gpu_enable_triton_gemm": "maybe"}},
    ],
)
def test_bad_values(arguments):
    with pytest.raises(BadOption, match="TP110") as caught:
        compile_options(**arguments)
    assert caught.value.fix


def test_preflight_options_are_known_to_both_versions():
    assert probe(PREFLIGHT).unknown == {}


def test_merging():
    merged = compile_options(overlap="off") | probe(PREFLIGHT)
    assert merged.options["xla_gpu_enable_triton_gemm"] is False
    assert merged.options["xla_gpu_disable_async_collectives"] == "ALLCOLLECTIVES"
