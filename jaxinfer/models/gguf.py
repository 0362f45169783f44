"""What families share in reading the key/value metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from jaxinfer.config import ModelConfig, require
from jaxinfer.models.fields import Fields
from jaxinfer.models.gguf_rope import rope_from_gguf
from jaxinfer.models.layout import GGUF_NAMES, TensorNames

HARMLESS = frozenset(["rope.scaling.finetuned"])


class GGUFSettings:
    """What a GGUF file says of a model beside its weights.

    Attributes:
        metadata: every key of the file.
        fields: the keys of the model's architecture, without its name before them.
        tensor_names: of the file; a bias or an output projection that it lacks the model has not.
        rope_tensors: the values of those `ROPE_TENSORS` that the file has.
    """

    def __init__(
        self,
        metadata: Mapping[str, Any],
        tensor_names: Collection[str],
        rope_tensors: Mapping[str, Sequence[float]],
    ):
        prefix = f"{metadata['general.architecture']}."
        self.metadata = metadata
        self.tensor_names = tensor_names
        self.rope_tensors = {
            name: tuple(map(_decimal, values)) for name, values in rope_tensors.items()
        }
        self.fields = Fields(
            {
                key.removeprefix(prefix): _decimal(value) if isinstance(value, float) else value
                for key, value in metadata.items()
                if key.startswith(prefix)
            },
            f"GGUF metadata of architecture {prefix[:-1]!r}",
        )

    @property
    def head_dim(self) -> int:
        """Dimensions of a head."""
        hidden_size, num_heads = map(
            self.fields.integer, ("embedding_length", "attention.head_count")
        )
        return self.fields.integer("attention.key_length", hidden_size // num_heads)


def decoder_from_gguf(
    file: GGUFSettings,
    *,
    family: str,
    names: TensorNames = GGUF_NAMES,
    eps: str = "attention.layer_norm_rms_epsilon",
    partial_rope: bool = False,
    harmless: Collection[str] = (),
    **own: Any,
) -> ModelConfig:
    """The config from the metadata that most families share.

    Args:
        names: of the file's tensors.
        eps: what the family calls this setting.
        partial_rope: whether a part of each head may rotate.
        harmless: settings that leave the family's results as they are.
        own: the family's own fields.

    Raises ValueError for a setting that has not been understood.
    """
    shards = file.metadata.get("split.count", 1)
    require(
        shards <= 1,
        f"This GGUF file is one of split.count={shards}. "
        "Merge them first (llama-gguf-split --merge).",
    )
    fields, head_dim = file.fields, file.head_dim
    num_heads = fields.integer("attention.head_count")
    fields.choice("attention.value_length", {head_dim: head_dim}, head_dim)
    fields.choice("expert_count", {0: 0}, 0)
    fields.choice("expert_used_count", {0: 0}, 0)
    tokens = file.metadata.get("tokenizer.ggml.tokens", ())
    biased = [
        f"{names.layer.format(i=0)}{module}.bias" in file.tensor_names
        for module in (names.query, names.out, names.up)
    ]
    config = ModelConfig(
        family=family,
        vocab_size=fields.integer("vocab_size", len(tokens) or None),
        hidden_size=fields.integer("embedding_length"),
        intermediate_size=fields.integer("feed_forward_length"),
        num_layers=fields.integer("block_count"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        norm_eps=fields.number(eps),
        rope=rope_from_gguf(fields, file.rope_tensors, head_dim, partial=partial_rope),
        qkv_bias=biased[0],
        out_bias=biased[1],
        mlp_bias=biased[2],
        tie_embeddings=f"{names.head}.weight" not in file.tensor_names,
        max_position=fields.integer("context_length"),
        bos_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        eos_ids=_eos_ids(file.metadata),
        **own,
    )
    fields.refuse_rest(HARMLESS.union(harmless))
    return config


def windows_from_gguf(fields: Fields, window: int | None, period: int) -> list[int | None]:
    """The window of each layer: of `period` layers all but the last have it, unless the file says
    otherwise.
    """
    count = fields.integer("block_count")
    pattern = fields.take("attention.sliding_window_pattern", period)
    slides = pattern
    if isinstance(pattern, int) and pattern > 0:
        slides = [i % pattern < pattern - 1 for i in range(count)]
    require(
        isinstance(slides, list) and len(slides) == count,
        f"This GGUF file has attention.sliding_window_pattern={str(pattern)[:200]}, which must be "
        f"a period or say of each of {count} layers whether it has a window. "
        "Convert the model again.",
    )
    return [window if slide else None for slide in slides]


def _decimal(value: float) -> float:
    """The shortest decimal that is this float32: 1e-05, not 9.99999974e-06 (files hold float32)."""
    return float(str(np.float32(value)))


def _eos_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """End of text, end of turn and end of message, as far as the file names them."""
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    return tuple(dict.fromkeys(metadata[key] for key in keys if key in metadata))
