"""The rotary embedding in a GGUF file: metadata, and tensors of divisors of the frequencies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.config import RopeConfig, require
from jaxinfer.models.fields import Fields

# Divisors of each frequency: for any context, for one beyond the original, for one up to it.
_ALL = "rope_freqs.weight"
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"

# The tensors of a file that are settings rather than weights.
ROPE_TENSORS = (_ALL, _LONG, _SHORT)

_KINDS = {"none": "default", "linear": "linear", "yarn": "yarn", "longrope": "longrope"}


def rope_from_gguf(
    fields: Fields, tensors: Mapping[str, Sequence[float]], head_dim: int, *, partial: bool
) -> RopeConfig:
    """The rotary embedding of a model, or of those of its layers that have none of their own.

    Args:
        tensors: the values of those `ROPE_TENSORS` that the file has.
        partial: whether a part of each head may rotate.
    """
    dim = fields.integer("rope.dimension_count", head_dim)
    require(
        dim == head_dim or partial,
        f"This GGUF file has rope.dimension_count={dim}, and its architecture rotates all "
        f"{head_dim} dimensions of a head. Convert the model again.",
    )
    common = {"theta": fields.number("rope.freq_base", 10000.0), "dim": dim}
    max_position = fields.integer("context_length")
    original = fields.integer("rope.scaling.original_context_length", max_position)
    attention_factor = fields.number("rope.scaling.attn_factor", 1.0)
    # Without a type a factor is that of linear scaling; of 0 it is none.
    kind = fields.choice("rope.scaling.type", _KINDS, "linear")
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0)) or 1.0
    if factor == 1 and kind != "longrope":
        kind = "default"
    if tensors or kind == "longrope":
        long, short = _divisors(tensors, kind)
        return RopeConfig(
            kind="longrope",
            **common,
            factor=max_position / original,
            original_max_position=original,
            attention_factor=attention_factor,
            long_factor=long,
            short_factor=short,
        )
    require(
        attention_factor == 1,
        f"This GGUF file has rope.scaling.attn_factor={attention_factor} without {_LONG}, which is "
        "not supported. Convert the model again.",
    )
    own: dict[str, Any] = {}
    if kind != "default":
        own = {"factor": factor}
    if kind == "yarn":
        own |= {
            "original_max_position": original,
            "beta_fast": fields.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": fields.number("rope.scaling.yarn_beta_slow", 1.0),
        }
    return RopeConfig(kind=kind, **common, **own)


def _divisors(
    tensors: Mapping[str, Sequence[float]], kind: str
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """For contexts beyond the original one, and up to it.

    Of Llama 3.1 converters write one set for both: its formula already worked out.
    """
    both = {_LONG, _SHORT}
    known = {"default": ({_ALL}, both), "longrope": (both,)}
    require(
        set(tensors) in known.get(kind, ()),
        f"This GGUF file has {' and '.join(tensors) or 'no divisors'} and rope.scaling.type="
        f"{kind!r}, which is not supported: it must be {_ALL}, or {_LONG} and {_SHORT}, without "
        "other scaling. Convert the model again.",
    )
    long, short = (tensors.get(name) or tensors[_ALL] for name in (_LONG, _SHORT))
    return tuple(long), tuple(short)
