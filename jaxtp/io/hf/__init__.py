"""Hugging Face checkpoints: in, straight to the right sharding, and out."""

from jaxtp.io.hf.adapters import save_adapter
from jaxtp.io.hf.load import load_hf
from jaxtp.io.hf.save import save_hf

__all__ = ["load_hf", "save_adapter", "save_hf"]
