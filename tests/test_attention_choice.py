"""Which kernel of attention a run uses, and that it says why."""

import dataclasses
import importlib.util

import pytest

from jaxtp import models as presets
from jaxtp.config.batch_sizes import resolve
from jaxtp.config.files import changed
from jaxtp.config.presets import preset
from jaxtp.errors import BadConfig
from jaxtp.models.attention import cudnn_obstacle
from jaxtp.train.attention import choose_attention

LLAMA = resolve(preset("llama3-8b"), 8)


@pytest.mark.parametrize(
    ("changes", "on_gpu", "kernel", "text"),
    [
        ({}, True, "cudnn", "no tokens x tokens arrays"),
        ({}, False, "xla", "there is no GPU"),
        ({"precision.compute": "float32"}, True, "xla", "16-bit types, not float32"),
        ({"precision.compute": "float16"}, True, "cudnn", "cudnn"),
        ({"mesh.tp": 16}, True, "xla", "8 do not divide by 16"),
        ({"data.packed": True, "seq_len": 127}, True, "xla", "even number of tokens, not 127"),
        ({"data.packed": True}, True, "cudnn", "cudnn"),
        ({"mesh.pp": 2}, True, "cudnn", "cudnn"),
        ({"mesh.dp": 2, "batch.accumulation": 2}, True, "cudnn", "cudnn"),
        ({"attention": "xla"}, True, "xla", "xla, as asked for"),
        ({"attention": "cudnn"}, True, "cudnn", "cudnn, as asked for"),
    ],
)
def test_cudnn_wherever_type_heads_and_gpu_allow(changes, on_gpu, kernel, text):
    config, why = choose_attention(changed(LLAMA, changes), on_gpu=on_gpu)
    assert config.attention == kernel
    assert text in why


@pytest.mark.parametrize(
    ("compute", "on_gpu", "text"),
    [("bfloat16", False, "this run has none"), ("float32", True, "16-bit types")],
)
def test_cudnn_where_it_cannot_run_is_refused(compute, on_gpu, text):
    asked = changed(LLAMA, {"attention": "cudnn", "precision.compute": compute})
    with pytest.raises(BadConfig, match=f"TP020 at attention: .*{text}"):
        choose_attention(asked, on_gpu=on_gpu)


@pytest.mark.parametrize("found", [True, False])
def test_ahead_of_any_gpu_the_library_is_needed(monkeypatch, found):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: "here" if found else None)
    config, why = choose_attention(LLAMA, on_gpu=True, ahead=True)
    assert config.attention == ("cudnn" if found else "xla")
    assert found or 'pip install "jaxtp[cudnn]"' in why
    asked = changed(LLAMA, {"attention": "cudnn"})
    if found:
        assert choose_attention(asked, on_gpu=True, ahead=True)[0].attention == "cudnn"
        return
    with pytest.raises(BadConfig, match=r'(?s)TP020 at attention: .* fix: .*"jaxtp\[cudnn\]"'):
        choose_attention(asked, on_gpu=True, ahead=True)


def test_a_soft_cap_and_wide_heads_are_obstacles():
    config = presets.config_of("llama3-8b")
    assert not cudnn_obstacle(config, "bfloat16", 8)
    capped = dataclasses.replace(config, attn_logit_softcapping=50.0)
    assert cudnn_obstacle(capped, "bfloat16", 8) == "cuDNN's attention has no soft cap"
    wide = dataclasses.replace(config, head_dim=256)
    assert "heads of up to 128" in cudnn_obstacle(wide, "bfloat16", 8)
