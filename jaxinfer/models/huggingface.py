"""What families share in reading and writing a Hugging Face config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxinfer.config import ModelConfig, RopeConfig, require
from jaxinfer.models.fields import Fields

ACTIVATIONS = {"silu": "silu", "swish": "silu"}

# Settings that leave inference as it is: provenance, training, form of the output, text generation.
HARMLESS = frozenset(
    {
        "_name_or_path",
        "architectures",
        "dtype",
        "id2label",
        "is_decoder",
        "is_llama_config",
        "label2id",
        "model_type",
        "problem_type",
        "task_specific_params",
        "tokenizer_class",
        "torch_dtype",
        "torchscript",
        "transformers.js_config",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "attention_dropout",
        "embd_pdrop",
        "hidden_dropout",
        "hidden_dropout_prob",
        "initializer_range",
        "resid_pdrop",
        "pretraining_tp",
        "gradient_checkpointing",
        "chunk_size_feed_forward",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "use_cache",
        "pad_token_id",
        "sep_token_id",
        "unk_token_id",
        "cls_token_id",
        "decoder_start_token_id",
        "do_sample",
        "early_stopping",
        "length_penalty",
        "max_length",
        "max_new_tokens",
        "min_length",
        "no_repeat_ngram_size",
        "num_beams",
        "num_return_sequences",
        "repetition_penalty",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
    }
)

# Of a rope setting: what its kind does not use, and who may therefore write it.
_HARMLESS_ROPE = {
    "default": ("original_max_position_embeddings", "factor"),
    "linear": ("original_max_position_embeddings",),
}


def decoder_from_hf(fields: Fields, *, family: str, tie_default: bool, **own: Any) -> ModelConfig:
    """The config from the settings that most families share; `own` are the family's own fields."""
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    require(
        fields.take("head_dim") is not None or hidden_size % num_heads == 0,
        f"config.json: hidden_size={hidden_size} is not a multiple of "
        f"num_attention_heads={num_heads}, and no head_dim is given. Add head_dim.",
    )
    head_dim = fields.integer("head_dim", hidden_size // num_heads)
    max_position = fields.integer("max_position_embeddings", 2048)
    fields.choice("rope_interleaved", {False: False}, False)
    return ModelConfig(
        family=family,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope_from_hf(fields, head_dim, max_position),
        activation=fields.choice("hidden_act", ACTIVATIONS, "silu"),
        tie_embeddings=fields.flag("tie_word_embeddings", tie_default),
        max_position=max_position,
        bos_id=fields.take("bos_token_id"),
        eos_ids=token_ids(fields.take("eos_token_id")),
        **own,
    )


def decoder_to_hf(config: ModelConfig, *, model_type: str, architecture: str) -> dict[str, Any]:
    """The config.json of `config`: `decoder_from_hf` gives `config` back."""
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope_to_hf(config.rope, config.head_dim),
        "hidden_act": config.activation,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": config.max_position,
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids),
    }


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """The ids of a setting that holds one, a list of them or none; in order, each once."""
    ids = [] if value is None else [value] if isinstance(value, int) else value
    return tuple(dict.fromkeys(ids))


def rope_from_hf(fields: Fields, head_dim: int, max_position: int) -> RopeConfig:
    """The rotary embedding from `rope_parameters`, or from `rope_theta` and `rope_scaling`.

    Where both forms are given they must agree. Missing fields of a kind take the defaults of
    Hugging Face's modeling_rope_utils.
    """
    new, old = fields.take("rope_parameters"), fields.take("rope_scaling")
    theta = fields.take("rope_theta")
    partial = fields.take("partial_rotary_factor")
    original = fields.take("original_max_position_embeddings")
    outer = {
        "rope_theta": theta,
        "partial_rotary_factor": partial,
        "original_max_position_embeddings": original,
    }
    outer = {name: value for name, value in outer.items() if value is not None}
    given = [{**outer, **form} for form in (new, old) if form]
    require(
        len(given) < 2 or given[0] == given[1],
        f"config.json: rope_parameters={new} and rope_scaling={old} contradict each other. "
        "Remove one.",
    )
    values = dict(given[0] if given else outer)
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
            "attention_factor": _optional(rope, "attention_factor"),
        }
        if kind == "yarn":
            own |= {
                "beta_fast": rope.number("beta_fast", 32.0),
                "beta_slow": rope.number("beta_slow", 1.0),
                "mscale": _optional(rope, "mscale"),
                "mscale_all_dim": _optional(rope, "mscale_all_dim"),
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


def _optional(fields: Fields, name: str) -> float | None:
    return None if fields.take(name) is None else fields.number(name)


def rope_to_hf(rope: RopeConfig, head_dim: int) -> Mapping[str, Any]:
    """The `rope_parameters` of `rope`."""
    values: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.dim != head_dim:
        partial = rope.dim / head_dim
        if int(head_dim * partial) < rope.dim:  # the product rounded down, and readers truncate it
            partial = math.nextafter(partial, 1.0)
        values["partial_rotary_factor"] = partial
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
