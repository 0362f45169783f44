"""Checkpoints on disk: finding, reading and writing them."""

from jaxinfer.checkpoint.fetch import ALIASES, resolve
from jaxinfer.checkpoint.loading import Checkpoint, load, load_params, open_checkpoint
from jaxinfer.checkpoint.orbax import require_new, save_orbax
from jaxinfer.checkpoint.saving import save_huggingface

__all__ = [
    "ALIASES",
    "Checkpoint",
    "load",
    "load_params",
    "open_checkpoint",
    "require_new",
    "resolve",
    "save_huggingface",
    "save_orbax",
]
