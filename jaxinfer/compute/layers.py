"""The modules that decoders are made of. Weights are `[out..., in...]`, had by one accessor.

Products take their operands in the weights' dtype and give float32; norms and the residual stream
are float32.
"""

from __future__ import annotations

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh

from jaxinfer.config import ModelConfig

# XLA:CPU has no fast 16-bit product for fewer rows, and rounds those differently; on TPU and GPU a
# tile is larger anyway.
MIN_ROWS = 3

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


def weight(
    module: nn.Module, name: str, shape: tuple[int, ...], init=nn.initializers.ones
) -> Array:
    """The parameter `name` of `module`, whatever its form; made by `init` when initialising."""
    if module.is_initializing():
        return module.param(name, init, shape)
    return module.get_variable("params", name)


def matmul(x: Array, w: Array, *, contract: int = 1, merge: bool = True) -> Array:
    """`x` times `w` over the last `contract` axes of both, float32: `[*x rows, *w out]`.

    `merge` multiplies by a matrix, whatever axes `w` has: far faster on CPU. It is impossible where
    an output axis that is not the first is split over devices.
    """
    rows, inner = x.shape[: x.ndim - contract], math.prod(x.shape[x.ndim - contract :])
    x_RI = x.reshape(-1, inner).astype(w.dtype)
    R = x_RI.shape[0]
    if w.dtype != jnp.float32 and R < MIN_ROWS:
        x_RI = jnp.pad(x_RI, ((0, MIN_ROWS - R), (0, 0)))
    out = w.shape[: w.ndim - contract]
    w = w.reshape(*((-1,) if merge else out), inner)
    axes = (((1,), (w.ndim - 1,)), ((), ()))
    y = lax.dot_general(x_RI, w, axes, preferred_element_type=jnp.float32)
    return y[:R].reshape(*rows, *out)


def soft_cap(x: Array, cap: float | None) -> Array:
    """`cap * tanh(x / cap)`: between -cap and cap; `x` itself without a cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)


class Linear(nn.Module):
    """A product with a weight of `shape` over its last `contract` axes, plus a bias if asked.

    For `merge` see `matmul`.
    """

    shape: tuple[int, ...]
    contract: int = 1
    use_bias: bool = False
    merge: bool = True

    @nn.compact
    def __call__(self, x: Array) -> Array:
        split = len(self.shape) - self.contract
        scale = math.prod(self.shape[split:]) ** -0.5
        y = matmul(
            x,
            weight(self, "weight", self.shape, nn.initializers.normal(scale)),
            contract=self.contract,
            merge=self.merge,
        )
        if self.use_bias:
            y += weight(self, "bias", self.shape[:split], nn.initializers.zeros)
        return y


class Norm(nn.Module):
    """`x / rms(x) * (offset + weight)` over the last axes, in float32 (arXiv 1910.07467); as a
    "layer" norm of `x - mean(x)`, and with a bias (1607.06450).
    """

    shape: tuple[int, ...]
    eps: float
    kind: str = "rms"
    offset: float = 0.0

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = x.astype(jnp.float32)
        axes = tuple(range(-len(self.shape), 0))
        if self.kind == "layer":
            x = x - jnp.mean(x, axis=axes, keepdims=True)
        x = x * lax.rsqrt(jnp.mean(x * x, axis=axes, keepdims=True) + self.eps)
        init = nn.initializers.constant(1 - self.offset)
        x = x * (self.offset + weight(self, "weight", self.shape, init).astype(jnp.float32))
        if self.kind == "layer":
            bias = weight(self, "bias", self.shape, nn.initializers.zeros)
            x = x + bias.astype(jnp.float32)
        return x


def residual_norm(config: ModelConfig, name: str | None = None) -> Norm:
    """The norm that the model applies to its residual stream."""
    shape = (config.hidden_size,)
    return Norm(shape, config.norm_eps, config.norm, config.norm_offset, name=name)


class MLP(nn.Module):
    """`down(act(gate(x)) * up(x))` (arXiv 2002.05202), gate and up one weight `[2, F, D]`; or
    `down(act(up(x)))`. With a mesh F is split over it.
    """

    config: ModelConfig
    mesh: Mesh | None = None

    @nn.compact
    def __call__(self, x: Array) -> Array:
        c = self.config
        D, F = c.hidden_size, c.intermediate_size
        act = ACTIVATIONS[c.activation]
        if c.gated_mlp:
            gate_up = Linear(
                (2, F, D), use_bias=c.mlp_bias, merge=self.mesh is None, name="gate_up"
            )(x)
            hidden = act(gate_up[..., 0, :]) * gate_up[..., 1, :]
        else:
            hidden = act(Linear((F, D), use_bias=c.mlp_bias, name="up")(x))
        return Linear((D, F), use_bias=c.mlp_bias, name="down")(hidden)
