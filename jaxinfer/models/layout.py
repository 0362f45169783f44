"""The leaves of a decoder with fused projections, given the names that a file uses.

Dimension key: V vocabulary, D model, F ffn, N query heads, K kv heads, G = N/K, H head dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from jaxinfer.config import ModelConfig
from jaxinfer.models.weights import Leaf, LeafPath, Part, stacked, whole


@dataclass(frozen=True, kw_only=True)
class TensorNames:
    """How a file calls its modules, whose tensors end in ".weight" and ".bias".

    Names within a layer stand behind `layer`, in which `{i}` is the layer's number. Where query,
    key and value have one name, or gate and up, they are rows of one tensor, in that order. A name
    is left empty if the file has no such module in any model.
    """

    embed: str
    norm: str
    head: str
    layer: str
    attention_norm: str
    attention_post_norm: str = ""
    query: str
    key: str
    value: str
    query_norm: str = ""
    key_norm: str = ""
    out: str
    mlp_norm: str
    mlp_post_norm: str = ""
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
    query_norm="self_attn.q_norm",
    key_norm="self_attn.k_norm",
    out="self_attn.o_proj",
    mlp_norm="post_attention_layernorm",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
)

# Of models with norms behind attention and MLP, which take over the name of the one before the MLP.
HF_POST_NORM_NAMES = replace(
    HF_NAMES,
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)

GGUF_NAMES = TensorNames(
    embed="token_embd",
    norm="output_norm",
    head="output",
    layer="blk.{i}.",
    attention_norm="attn_norm",
    attention_post_norm="post_attention_norm",
    query="attn_q",
    key="attn_k",
    value="attn_v",
    query_norm="attn_q_norm",
    key_norm="attn_k_norm",
    out="attn_output",
    mlp_norm="ffn_norm",
    mlp_post_norm="post_ffw_norm",
    gate="ffn_gate",
    up="ffn_up",
    down="ffn_down",
)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where a file has the leaves of a decoder: a function from its config to them.

    Attributes:
        interleaved: the rows of each query and key head stand pair by pair (i, i + H/2).
        grouped: the one tensor of query, key and value has its rows as the leaf has them: of each
            kv head the queries, the key, the value.
        norm_offset: what the file adds to the weights of norms.
    """

    names: TensorNames
    interleaved: bool = False
    grouped: bool = False
    norm_offset: float = 0.0

    def __call__(self, config: ModelConfig) -> tuple[Leaf, ...]:
        """Every leaf of the params tree of `config`."""
        V, D, names = config.vocab_size, config.hidden_size, self.names
        head = f"{names.head}.weight"
        copies = (head,) if config.tie_embeddings else ()
        leaves = [whole(("embed", "weight"), f"{names.embed}.weight", (V, D), copies=copies)]
        for i in range(config.num_layers):
            path, prefix = ("layers", i), names.layer.format(i=i)
            leaves += self._attention(config, path, prefix)
            leaves += self._mlp(config, path, prefix)
        leaves += self._norm(config, ("norm",), names.norm)
        if not config.tie_embeddings:
            leaves.append(whole(("head", "weight"), head, (V, D)))
        return tuple(leaves)

    def _attention(self, config: ModelConfig, path: LeafPath, prefix: str) -> Iterator[Leaf]:
        names, D, N, H = self.names, config.hidden_size, config.num_heads, config.head_dim
        inner = (*path, "attention")
        if config.pre_norm:
            yield from self._norm(config, (*path, "attention_norm"), prefix + names.attention_norm)
        for kind in _kinds(config.qkv_bias):
            yield self._qkv(config, (*inner, "qkv", kind), prefix)
        if config.qk_norm is not None:
            yield from self._qk_norms(config, inner, prefix)
        out = f"{prefix}{names.out}"
        yield whole((*inner, "out", "weight"), f"{out}.weight", (D, N * H))
        if config.out_bias:
            yield whole((*inner, "out", "bias"), f"{out}.bias", (D,))
        if config.post_norm:
            post_norm = prefix + names.attention_post_norm
            yield from self._norm(config, (*path, "attention_post_norm"), post_norm)

    def _mlp(self, config: ModelConfig, path: LeafPath, prefix: str) -> Iterator[Leaf]:
        names, D, F = self.names, config.hidden_size, config.intermediate_size
        if config.pre_norm and not config.shared_norm:
            yield from self._norm(config, (*path, "mlp_norm"), prefix + names.mlp_norm)
        for kind in _kinds(config.mlp_bias):
            rows = (F, D) if kind == "weight" else (F,)
            if config.gated_mlp:
                halves = (
                    Part(f"{prefix}{module}.{kind}", rows, rows, (half,))
                    for half, module in enumerate((names.gate, names.up))
                )
                yield Leaf((*path, "mlp", "gate_up", kind), (2, *rows), stacked(halves))
            else:
                yield whole((*path, "mlp", "up", kind), f"{prefix}{names.up}.{kind}", rows)
        for kind in _kinds(config.mlp_bias):
            rows = (D, F) if kind == "weight" else (D,)
            yield whole((*path, "mlp", "down", kind), f"{prefix}{names.down}.{kind}", rows)
        if config.post_norm:
            post_norm = prefix + names.mlp_post_norm
            yield from self._norm(config, (*path, "mlp_post_norm"), post_norm)

    def _norm(self, config: ModelConfig, path: LeafPath, name: str) -> Iterator[Leaf]:
        """A norm of the residual stream."""
        shape = (config.hidden_size,)
        weight = Part(f"{name}.weight", shape, shape, offset=self.norm_offset)
        yield Leaf((*path, "weight"), shape, (weight,))
        if config.norm == "layer":
            yield whole((*path, "bias"), f"{name}.bias", shape)

    def _qk_norms(self, config: ModelConfig, path: LeafPath, prefix: str) -> Iterator[Leaf]:
        K, G, H = config.num_kv_heads, config.group_size, config.head_dim
        by_head = config.qk_norm == "head"
        for leaf, module, heads in (
            ("q_norm", self.names.query_norm, G),
            ("k_norm", self.names.key_norm, 1),
        ):
            view = (H,) if by_head else (K, heads, H)
            shape = (math.prod(view),)
            part = Part(f"{prefix}{module}.weight", shape, view, offset=self.norm_offset)
            yield Leaf((*path, leaf, "weight"), view, (part,))

    def _qkv(self, config: ModelConfig, path: LeafPath, prefix: str) -> Leaf:
        """The fused projection `[K, G+2, H, *columns]`: of each kv head queries, key, value."""
        K, G, H = config.num_kv_heads, config.group_size, config.head_dim
        kind = path[-1]
        columns = (config.hidden_size,) if kind == "weight" else ()
        shape = (K, G + 2, H, *columns)
        if self.grouped:
            name = f"{prefix}{self.names.query}.{kind}"
            return Leaf(path, shape, (Part(name, (K * (G + 2) * H, *columns), shape),))
        every = slice(None)
        parts = []
        for module, heads, place in (
            (self.names.query, (K, G), slice(0, G)),
            (self.names.key, (K,), G),
            (self.names.value, (K,), G + 1),
        ):
            rotates = place != G + 1
            parts.append(
                Part(
                    f"{prefix}{module}.{kind}",
                    (math.prod(heads) * H, *columns),
                    (*heads, H, *columns),
                    (every, place),
                    interleaved_axis=len(heads) if rotates and self.interleaved else None,
                )
            )
        return Leaf(path, shape, stacked(parts))


def _kinds(has_bias: bool) -> tuple[str, ...]:
    """The tensors of a linear module."""
    return ("weight", "bias") if has_bias else ("weight",)
