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


def matmul(x: Array, w: Array, *, contract: int = 1) -> Array:
    """`x` times `w` over the last `contract` axes of both, float32: `[*x rows, *w out]`."""
    rows, inner = x.shape[: x.ndim - contract], math.prod(x.shape[x.ndim - contract :])
    x_RI = x.reshape(-1, inner).astype(w.dtype)
    R = x_RI.shape[0]
    if w.dtype != jnp.float32 and R < MIN_ROWS:
        x_RI = jnp.pad(x_RI, ((0, MIN_ROWS - R), (0, 0)))
    w_OI = w.reshape(-1, inner)
    y_RO = lax.dot_general(x_RI, w_OI, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return y_RO[:R].reshape(*rows, *w.shape[: w.ndim - contract])


class Linear(nn.Module):
    """A product with a weight of `shape` over its last `contract` axes, plus a bias if asked."""

    shape: tuple[int, ...]
    contract: int = 1
    use_bias: bool = False

    @nn.compact
    def __call__(self, x: Array) -> Array:
        split = len(self.shape) - self.contract
        scale = math.prod(self.shape[split:]) ** -0.5
        y = matmul(
            x,
            weight(self, "weight", self.shape, nn.initializers.normal(scale)),
            contract=self.contract,
        )
        if self.use_bias:
            y += weight(self, "bias", self.shape[:split], nn.initializers.zeros)
        return y


class RMSNorm(nn.Module):
    """`x / rms(x) * weight` over the last axis, in float32 (arXiv 1910.07467)."""

    size: int
    eps: float

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = x.astype(jnp.float32)
        x = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps)
        return x * weight(self, "weight", (self.size,)).astype(jnp.float32)


class GatedMLP(nn.Module):
    """`down(act(gate(x)) * up(x))` (arXiv 2002.05202); gate and up are one weight `[2, F, D]`."""

    hidden_size: int
    intermediate_size: int
    activation: str
    use_bias: bool = False

    @nn.compact
    def __call__(self, x: Array) -> Array:
        D, F = self.hidden_size, self.intermediate_size
        gate_up = Linear((2, F, D), use_bias=self.use_bias, name="gate_up")(x)
        act = ACTIVATIONS[self.activation]
        hidden = act(gate_up[..., 0, :]) * gate_up[..., 1, :]
        return Linear((D, F), use_bias=self.use_bias, name="down")(hidden)
