"""What families share in reading and writing a Hugging Face config.json."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from jaxinfer.config import LayerKind, ModelConfig, RopeConfig, require
from jaxinfer.models.fields import Fields
from jaxinfer.models.huggingface_rope import rope_from_hf, rope_to_hf

# The names of transformers' activations, by the formulas that they stand for.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}
_ACTIVATION_NAMES = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}

_LAYER_TYPES = ("full_attention", "sliding_attention")

# Settings that leave inference as it is: provenance, training, form of the output, text generation.
HARMLESS = frozenset(
    {
        "_name_or_path",
        "_attn_implementation_autoset",
        "architectures",
        "auto_map",
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
        "attention_probs_dropout_prob",
        "classifier_dropout",
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


def settings(hf: Mapping[str, Any], **defaults: Any) -> Fields:
    """The settings of config.json, with the `defaults` of those that it lacks.

    A setting of null is not lacking: it says that there is no such thing.
    """
    return Fields({**defaults, **hf}, "config.json")


def decoder_from_hf(
    fields: Fields,
    *,
    family: str,
    eps: str = "rms_norm_eps",
    act: str = "hidden_act",
    rope: RopeConfig | None = None,
    harmless: Collection[str] = (),
    **own: Any,
) -> ModelConfig:
    """The config from the settings that most families share.

    Args:
        eps, act: what the family calls these settings.
        rope: the rotary embedding, where it does not stand at its usual place.
        harmless: settings that no model of the family reads.
        own: the family's own fields.

    Raises ValueError for a setting that has not been understood.
    """
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    require(
        fields.take("head_dim") is not None or hidden_size % num_heads == 0,
        f"config.json: hidden_size={hidden_size} is not a multiple of "
        f"num_attention_heads={num_heads}, and no head_dim is given. Add head_dim.",
    )
    head_dim = fields.integer("head_dim", hidden_size // num_heads)
    max_position = fields.integer("max_position_embeddings", 2048)
    fields.expect(rope_interleaved=False, is_encoder_decoder=False)
    config = ModelConfig(
        family=family,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        norm_eps=fields.number(eps, 1e-6),
        rope=rope or rope_from_hf(fields, head_dim, max_position),
        activation=fields.choice(act, ACTIVATIONS, "silu"),
        tie_embeddings=fields.flag("tie_word_embeddings"),
        max_position=max_position,
        bos_id=fields.take("bos_token_id"),
        eos_ids=token_ids(fields.take("eos_token_id")),
        **own,
    )
    fields.refuse_rest(HARMLESS.union(harmless))
    return config


def decoder_to_hf(
    config: ModelConfig,
    *,
    model_type: str,
    architecture: str,
    eps: str = "rms_norm_eps",
    act: str = "hidden_act",
    **own: Any,
) -> dict[str, Any]:
    """The config.json of `config` with the family's own settings: the inverse of the above."""
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
        eps: config.norm_eps,
        "rope_parameters": rope_to_hf(config.rope, config.head_dim),
        act: _ACTIVATION_NAMES[config.activation],
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": config.max_position,
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids),
        "pad_token_id": None,
        **own,
    }


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """The ids of a setting that holds one, a list of them or none; in order, each once."""
    ids = [] if value is None else [value] if isinstance(value, int) else value
    return tuple(dict.fromkeys(ids))


def renamed(hf: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """`hf` with settings under the new `names` of old ones, whose values must agree if both are
    there.
    """
    result = {name: value for name, value in hf.items() if name not in names}
    for old, new in names.items():
        if hf.get(old) is None:
            continue
        require(
            result.setdefault(new, hf[old]) == hf[old],
            f"config.json: {old}={hf[old]} and {new}={result[new]} contradict each other. "
            "Remove one.",
        )
    return result


def windows_from_hf(
    fields: Fields, window: int | None, slides: Callable[[int], bool]
) -> list[int | None]:
    """The window of each layer: as `layer_types` says or, where that is not given, `slides`."""
    count = fields.integer("num_hidden_layers")
    types = fields.take("layer_types")
    if types is None:
        types = [_LAYER_TYPES[slides(i) and window is not None] for i in range(count)]
    require(
        isinstance(types, list) and len(types) == count and set(types) <= set(_LAYER_TYPES),
        f"config.json: layer_types={str(types)[:200]} must name {count} layers, each one of "
        f"{', '.join(_LAYER_TYPES)}. Use a model of such layers.",
    )
    require(
        window is not None or "sliding_attention" not in types,
        "config.json: layer_types has sliding_attention, but no sliding_window is in use. "
        "Set sliding_window, and use_sliding_window where the family has it.",
    )
    return [window if kind == "sliding_attention" else None for kind in types]


def windows_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The settings from which `windows_from_hf` gives the windows of `config`."""
    windows = sorted({window for window in config.windows if window is not None})
    require(
        len(windows) <= 1,
        f"config.json can hold one sliding_window, and this config has windows of {windows}. "
        "Save it in the form of `jaxinfer convert`.",
    )
    return {
        "sliding_window": windows[0] if windows else None,
        "layer_types": [_LAYER_TYPES[window is not None] for window in config.windows],
    }


def pattern_of(kinds: Iterable[LayerKind]) -> tuple[LayerKind, ...]:
    """The shortest pattern that repeats to these kinds, one for each layer."""
    kinds = tuple(kinds)
    periods = range(1, len(kinds) + 1)
    period = next(n for n in periods if all(kind == kinds[i % n] for i, kind in enumerate(kinds)))
    return kinds[:period]


def preimage(function: Callable[[float], float], value: float, guess: float) -> float:
    """The number at `guess` whose `function` is exactly `value`; an int if there is one.

    So that what is computed from a setting gives the very setting back.
    """
    around = (guess, math.nextafter(guess, math.inf), math.nextafter(guess, -math.inf))
    return next((x for x in (round(guess), *around) if x and function(x) == value), guess)
