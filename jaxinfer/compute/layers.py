"""The modules that decoders are made of. Weights are `[out..., in...]`, had by one accessor.

Products take their operands in the weights' dtype and give float32; norms and the residual stream
are float32.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxinfer.compute.sharding import param_spec, shard, spec
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


def matmul(x: Array, w: Array) -> Array:
    """`x` times `w` over the last axis of both, float32: `[*x rows, *w out]`.

    The product is one of matrices, whatever axes `w` has: of others XLA:CPU transposes the weight.
    """
    rows, inner = x.shape[:-1], x.shape[-1]
    x_RI = x.reshape(-1, inner).astype(w.dtype)
    R = x_RI.shape[0]
    if w.dtype != jnp.float32 and R < MIN_ROWS:
        x_RI = jnp.pad(x_RI, ((0, MIN_ROWS - R), (0, 0)))
    axes = (((1,), (1,)), ((), ()))
    y = lax.dot_general(x_RI, w.reshape(-1, inner), axes, preferred_element_type=jnp.float32)
    return y[:R].reshape(*rows, *w.shape[:-1])


def soft_cap(x: Array, cap: float | None) -> Array:
    """`cap * tanh(x / cap)`: between -cap and cap; `x` itself without a cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)


class Linear(nn.Module):
    """A product with a weight of `shape` over its last axis, plus a bias if asked.

    `mesh`: what output axes of the weight are split over. Each shard then computes its own outputs:
    a partitioner would not keep axes split that `matmul` merges, and XLA would copy a layer out of
    stacked weights before it multiplies.
    """

    shape: tuple[int, ...]
    use_bias: bool = False
    mesh: Mesh | None = None

    @nn.compact
    def __call__(self, x: Array) -> Array:
        init = nn.initializers.normal(self.shape[-1] ** -0.5)
        split = param_spec(self.name or "", "weight", len(self.shape))
        rows = spec("rows", *(None,) * (x.ndim - 2))
        product = shard(matmul, self.mesh, in_specs=(rows, split), out_specs=P(*rows, *split[:-1]))
        y = product(x, weight(self, "weight", self.shape, init))
        if self.use_bias:
            y += weight(self, "bias", self.shape[:-1], nn.initializers.zeros)
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
            gate_up = Linear((2, F, D), use_bias=c.mlp_bias, mesh=self.mesh, name="gate_up")(x)
            hidden = act(gate_up[..., 0, :]) * gate_up[..., 1, :]
        else:
            hidden = act(Linear((F, D), use_bias=c.mlp_bias, mesh=self.mesh, name="up")(x))
        return Linear((D, F), use_bias=c.mlp_bias, name="down")(hidden)
