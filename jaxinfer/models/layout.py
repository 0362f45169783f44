"""The leaves of a decoder with fused projections, given the names that a file uses.

Dimension key: V vocabulary, D model, F ffn, N query heads, K kv heads, G = N/K, H head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jaxinfer.config import ModelConfig
from jaxinfer.models.weights import Leaf, LeafPath, Part, whole


@dataclass(frozen=True, kw_only=True)
class TensorNames:
    """How a file calls its modules, whose tensors end in ".weight" and ".bias".

    Names within a layer stand behind `layer`, in which `{i}` is the layer's number.
    """

    embed: str
    norm: str
    head: str
    layer: str
    attention_norm: str
    query: str
    key: str
    value: str
    out: str
    mlp_norm: str
    gate: str
    up: str
    down: str


HF_NAMES = TensorNames(
    embed="model.embed_tokens",
    norm="model.norm",
    head="lm_head",
    layer="model.layers.{i}.",
    attention_norm="input_layernorm",
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    out="self_attn.o_proj",
    mlp_norm="post_attention_layernorm",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
)

GGUF_NAMES = TensorNames(
    embed="token_embd",
    norm="output_norm",
    head="output",
    layer="blk.{i}.",
    attention_norm="attn_norm",
    query="attn_q",
    key="attn_k",
    value="attn_v",
    out="attn_output",
    mlp_norm="ffn_norm",
    gate="ffn_gate",
    up="ffn_up",
    down="ffn_down",
)


def decoder_leaves(
    config: ModelConfig, names: TensorNames, *, interleaved: bool = False
) -> tuple[Leaf, ...]:
    """Every leaf of the params tree of `config`.

    Args:
        interleaved: the file stores the rows of each query and key head pair by pair (i, i + H/2).
    """
    V, D = config.vocab_size, config.hidden_size
    head = f"{names.head}.weight"
    leaves = [
        whole(
            ("embed", "weight"),
            f"{names.embed}.weight",
            (V, D),
            copies=(head,) if config.tie_embeddings else (),
        )
    ]
    for i in range(config.num_layers):
        leaves += _layer_leaves(config, names, i, interleaved)
    leaves.append(whole(("norm", "weight"), f"{names.norm}.weight", (D,)))
    if not config.tie_embeddings:
        leaves.append(whole(("head", "weight"), head, (V, D)))
    return tuple(leaves)


def _layer_leaves(
    config: ModelConfig, names: TensorNames, i: int, interleaved: bool
) -> Iterator[Leaf]:
    D, F, N, H = config.hidden_size, config.intermediate_size, config.num_heads, config.head_dim
    path: LeafPath = ("layers", i)
    prefix = names.layer.format(i=i)
    yield whole((*path, "attention_norm", "weight"), f"{prefix}{names.attention_norm}.weight", (D,))
    for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
        qkv = (*path, "attention", "qkv", kind)
        yield _qkv_leaf(config, names, qkv, prefix, interleaved=interleaved)
    out = f"{prefix}{names.out}"
    weight = Part(f"{out}.weight", (D, N * H), (D, N, H))
    yield Leaf((*path, "attention", "out", "weight"), (D, N, H), (weight,))
    if config.out_bias:
        yield whole((*path, "attention", "out", "bias"), f"{out}.bias", (D,))

    yield whole((*path, "mlp_norm", "weight"), f"{prefix}{names.mlp_norm}.weight", (D,))
    for kind in ("weight", "bias") if config.mlp_bias else ("weight",):
        rows = (F, D) if kind == "weight" else (F,)
        halves = tuple(
            Part(f"{prefix}{module}.{kind}", rows, rows, (half,))
            for half, module in enumerate((names.gate, names.up))
        )
        yield Leaf((*path, "mlp", "gate_up", kind), (2, *rows), halves)
    down = f"{prefix}{names.down}"
    yield whole((*path, "mlp", "down", "weight"), f"{down}.weight", (D, F))
    if config.mlp_bias:
        yield whole((*path, "mlp", "down", "bias"), f"{down}.bias", (D,))


def _qkv_leaf(
    config: ModelConfig, names: TensorNames, path: LeafPath, prefix: str, *, interleaved: bool
) -> Leaf:
    """The fused projection `[K, G+2, H, *columns]`: of each kv head queries, key, value."""
    K, G, H = config.num_kv_heads, config.group_size, config.head_dim
    kind = path[-1]
    columns = (config.hidden_size,) if kind == "weight" else ()
    every = slice(None)
    query = Part(
        f"{prefix}{names.query}.{kind}",
        (K * G * H, *columns),
        (K, G, H, *columns),
        (every, slice(0, G)),
        interleaved_axis=2 if interleaved else None,
    )
    key = Part(
        f"{prefix}{names.key}.{kind}",
        (K * H, *columns),
        (K, H, *columns),
        (every, G),
        interleaved_axis=1 if interleaved else None,
    )
    value = Part(
        f"{prefix}{names.value}.{kind}", (K * H, *columns), (K, H, *columns), (every, G + 1)
    )
    return Leaf(path, (K, G + 2, H, *columns), (query, key, value))
