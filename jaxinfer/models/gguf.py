"""What families share in reading the key/value metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from jaxinfer.config import ModelConfig, RopeConfig, require
from jaxinfer.models.fields import Fields
from jaxinfer.models.layout import GGUF_NAMES

# Per-frequency divisors of the rotary embedding: a tensor of settings rather than of weights.
ROPE_DIVISORS = "rope_freqs.weight"

HARMLESS = frozenset(["rope.scaling.finetuned"])


def decoder_from_gguf(
    metadata: Mapping[str, Any],
    tensor_names: Collection[str],
    rope_divisors: Sequence[float],
    *,
    family: str,
    **own: Any,
) -> ModelConfig:
    """The config from the metadata that most families share.

    Args:
        metadata: all keys of the file.
        tensor_names: of the file; a missing output projection means that the embedding is used.
        rope_divisors: the values of `ROPE_DIVISORS` if the file has it, else empty.
        own: the family's own fields.
    """
    architecture = metadata["general.architecture"]
    shards = metadata.get("split.count", 1)
    require(
        shards <= 1,
        f"This GGUF file is one of split.count={shards}. "
        "Merge them first (llama-gguf-split --merge).",
    )
    prefix = f"{architecture}."
    fields = Fields(
        {
            key.removeprefix(prefix): value
            for key, value in metadata.items()
            if key.startswith(prefix)
        },
        f"GGUF metadata of architecture {architecture!r}",
    )
    hidden_size = fields.integer("embedding_length")
    num_heads = fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", hidden_size // num_heads)
    fields.choice("attention.value_length", {head_dim: head_dim}, head_dim)
    fields.choice("expert_count", {0: 0}, 0)
    fields.choice("expert_used_count", {0: 0}, 0)
    max_position = fields.integer("context_length")
    vocab_size = fields.integer(
        "vocab_size", len(metadata.get("tokenizer.ggml.tokens", ())) or None
    )
    config = ModelConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("feed_forward_length"),
        num_layers=fields.integer("block_count"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        norm_eps=_decimal(fields.number("attention.layer_norm_rms_epsilon")),
        rope=_rope(fields, head_dim, max_position, rope_divisors),
        qkv_bias=f"{GGUF_NAMES.layer.format(i=0)}{GGUF_NAMES.query}.bias" in tensor_names,
        out_bias=f"{GGUF_NAMES.layer.format(i=0)}{GGUF_NAMES.out}.bias" in tensor_names,
        mlp_bias=f"{GGUF_NAMES.layer.format(i=0)}{GGUF_NAMES.gate}.bias" in tensor_names,
        tie_embeddings=f"{GGUF_NAMES.head}.weight" not in tensor_names,
        max_position=max_position,
        bos_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_ids=_eos_ids(metadata),
        **own,
    )
    fields.refuse_rest(HARMLESS)
    return config


def _rope(
    fields: Fields, head_dim: int, max_position: int, divisors: Sequence[float]
) -> RopeConfig:
    """The rotary embedding. Divisors in a tensor are the llama3 formula already worked out."""
    theta = _decimal(fields.number("rope.freq_base", 10000.0))
    dim = fields.choice("rope.dimension_count", {head_dim: head_dim}, head_dim)
    old_factor = fields.number("rope.scale_linear", 1.0)
    kind = fields.choice(
        "rope.scaling.type",
        {"none": "default", "linear": "linear", "yarn": "yarn"},
        "none" if old_factor == 1 else "linear",
    )
    factor = fields.number("rope.scaling.factor", old_factor)
    fields.choice("rope.scaling.attn_factor", {1.0: 1.0}, 1.0)
    original = fields.integer("rope.scaling.original_context_length", max_position)
    if divisors:
        require(
            kind == "default",
            f"This GGUF file has both {ROPE_DIVISORS} and rope.scaling.type={kind!r}, which is not "
            "supported. Convert the model again.",
        )
        factors = tuple(float(value) for value in divisors)
        return RopeConfig(
            kind="longrope",
            theta=theta,
            dim=dim,
            original_max_position=max_position,
            attention_factor=1.0,
            short_factor=factors,
            long_factor=factors,
        )
    if kind == "default" or factor == 1:
        return RopeConfig(theta=theta, dim=dim)
    if kind == "linear":
        return RopeConfig(kind=kind, theta=theta, dim=dim, factor=factor)
    return RopeConfig(
        kind=kind, theta=theta, dim=dim, factor=factor, original_max_position=original
    )


def _decimal(value: float) -> float:
    """The shortest decimal that is this float32: 1e-05, not 9.99999974e-06 (files hold float32)."""
    return float(str(np.float32(value)))


def _eos_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """End of text, end of turn and end of message, as far as the file names them."""
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    return tuple(dict.fromkeys(metadata[key] for key in keys if key in metadata))
