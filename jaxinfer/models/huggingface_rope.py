"""The rotary embedding in a Hugging Face config.json, old forms and new."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxinfer.config import RopeConfig, require
from jaxinfer.models.fields import Fields

# Of a rope setting: what its kind does not use, and who may therefore write it.
_HARMLESS_ROPE = {
    "default": ("original_max_position_embeddings", "factor"),
    "linear": ("original_max_position_embeddings",),
}


def rope_from_hf(fields: Fields, head_dim: int, max_position: int) -> RopeConfig:
    """The rotary embedding from `rope_parameters`, or from `rope_theta` and `rope_scaling`.

    Where both forms are given they must agree. As Hugging Face's modeling_rope_utils has it: an
    `original_max_position_embeddings` beside them goes before theirs, a `rope_theta` or
    `partial_rotary_factor` after, and missing fields of a kind take its defaults.
    """
    new, old = fields.take("rope_parameters"), fields.take("rope_scaling")
    names = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
    outer = {name: fields.take(name) for name in names}
    outer = {name: value for name, value in outer.items() if value is not None}
    given = [{**outer, **form} for form in (new, old) if form]
    require(
        len(given) < 2 or given[0] == given[1],
        f"config.json: rope_parameters={new} and rope_scaling={old} contradict each other. "
        "Remove one.",
    )
    values = dict(given[0] if given else outer)
    if names[-1] in outer:
        values[names[-1]] = outer[names[-1]]
    kind = values.pop("rope_type", None) or values.get("type") or "default"
    values.pop("type", None)
    return _rope(
        Fields(values, f"config.json, rope of type {kind!r}"), kind, head_dim, max_position
    )


def _rope(rope: Fields, kind: str, head_dim: int, max_position: int) -> RopeConfig:
    kind = {"su": "longrope"}.get(kind, kind)
    common: dict[str, Any] = {
        "kind": kind,
        "theta": rope.number("rope_theta", 10000.0),
        "dim": int(head_dim * rope.number("partial_rotary_factor", 1.0)),
    }
    own: dict[str, Any] = {}
    if kind == "linear":
        own = {"factor": rope.number("factor")}
    elif kind == "llama3":
        own = {
            "factor": rope.number("factor"),
            "low_freq_factor": rope.number("low_freq_factor"),
            "high_freq_factor": rope.number("high_freq_factor"),
            "original_max_position": rope.integer("original_max_position_embeddings"),
        }
    elif kind in ("yarn", "longrope"):
        original = rope.integer("original_max_position_embeddings", max_position)
        own = {
            "factor": rope.number("factor", max_position / original),
            "original_max_position": original,
            "attention_factor": rope.optional_number("attention_factor"),
        }
        if kind == "yarn":
            own |= {
                "beta_fast": rope.number("beta_fast", 32.0),
                "beta_slow": rope.number("beta_slow", 1.0),
                "mscale": rope.optional_number("mscale"),
                "mscale_all_dim": rope.optional_number("mscale_all_dim"),
                "truncate": rope.flag("truncate", True),
            }
        else:
            own |= {
                name: tuple(float(value) for value in rope.take(name, ()))
                for name in ("short_factor", "long_factor")
            }
    config = RopeConfig(**common, **own)  # refuses a kind it does not know
    rope.refuse_rest(_HARMLESS_ROPE.get(kind, ()))
    return config


def rope_to_hf(rope: RopeConfig, head_dim: int) -> Mapping[str, Any]:
    """The `rope_parameters` of `rope`."""
    values: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.dim != head_dim:
        values["partial_rotary_factor"] = partial_to_hf(rope, head_dim)
    if rope.kind != "default":
        values["factor"] = rope.factor
    if rope.kind in ("llama3", "yarn", "longrope"):
        values["original_max_position_embeddings"] = rope.original_max_position
    own = {
        "llama3": ("low_freq_factor", "high_freq_factor"),
        "yarn": (
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ),
        "longrope": ("attention_factor", "short_factor", "long_factor"),
    }
    for name in own.get(rope.kind, ()):
        value = getattr(rope, name)
        if value is not None:
            values[name] = list(value) if isinstance(value, tuple) else value
    return values


def partial_to_hf(rope: RopeConfig, head_dim: int) -> float:
    """The `partial_rotary_factor` of `rope`, whose product with `head_dim` readers truncate."""
    partial = rope.dim / head_dim
    return partial if int(head_dim * partial) == rope.dim else math.nextafter(partial, 1.0)
