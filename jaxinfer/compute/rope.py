"""Rotary position embedding: the published frequencies, float32 phases, the rotation."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxinfer.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, max_position: int) -> tuple[np.ndarray, float]:
    """`(inv_freq [dim / 2] float32, factor)`: radians per position; factor of sin and cos.

    Computed in float64 on the host and rounded once. Sources: RoFormer (arXiv 2104.09864), position
    interpolation (2306.15595), YaRN (2309.00071), LongRoPE (2402.13753), and for "llama3" the Llama
    3.1 release. LongRoPE's long factors apply where `max_position`, the longest context to be
    used, exceeds the original one: they are chosen once, never by a request's length.
    """
    steps = np.arange(0, rope.dim, 2, dtype=np.float64) / rope.dim
    inv_freq = rope.theta**-steps
    factor = 1.0
    if rope.kind == "linear":
        inv_freq = inv_freq / rope.factor
    elif rope.kind == "llama3":
        inv_freq = _llama3(inv_freq, rope)
    elif rope.kind == "yarn":
        inv_freq, factor = _yarn(inv_freq, rope)
    elif rope.kind == "longrope":
        long = max_position > rope.original_max_position
        inv_freq = inv_freq / np.asarray(rope.long_factor if long else rope.short_factor)
        if rope.factor > 1:
            factor = math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position))
    if rope.attention_factor is not None:
        factor = rope.attention_factor
    return inv_freq.astype(np.float32), float(factor)


def _llama3(inv_freq: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Long wavelengths divided by the factor, short ones kept, those between blended."""
    wavelength = 2 * math.pi / inv_freq
    low = rope.original_max_position / rope.low_freq_factor
    high = rope.original_max_position / rope.high_freq_factor
    span = rope.high_freq_factor - rope.low_freq_factor
    kept = (rope.original_max_position / wavelength - rope.low_freq_factor) / span
    blended = (1 - kept) * inv_freq / rope.factor + kept * inv_freq
    return np.where(
        wavelength > low, inv_freq / rope.factor, np.where(wavelength < high, inv_freq, blended)
    )


def _yarn(inv_freq: np.ndarray, rope: RopeConfig) -> tuple[np.ndarray, float]:
    """Frequencies that turn rarely within the original context interpolated, the fast ones kept."""

    def dimension_of(rotations: float) -> float:
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return rope.dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    ramp = np.clip((np.arange(rope.dim // 2) - low) / max(high - low, 1e-3), 0, 1)
    scaled = inv_freq / rope.factor * ramp + inv_freq * (1 - ramp)

    def magnitude(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scaled, magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return scaled, magnitude(1.0)


def rope_phases(rope: RopeConfig, max_position: int, positions_BT: Array) -> tuple[Array, Array]:
    """`(sin_BTR, cos_BTR)` float32 of the positions, R = dim / 2, to be shared by layers."""
    inv_freq_R, factor = inverse_frequencies(rope, max_position)
    angle_BTR = positions_BT[..., None].astype(jnp.float32) * inv_freq_R
    return jnp.sin(angle_BTR) * factor, jnp.cos(angle_BTR) * factor


def apply_rope(x_BTKJH: Array, phases: tuple[Array, Array]) -> Array:
    """The heads of `x` rotated: dimension i pairs with i + R; those from 2R on are left alone."""
    sin, cos = (phase[:, :, None, None, :] for phase in phases)
    R = sin.shape[-1]
    a, b, rest = jnp.split(x_BTKJH, (R, 2 * R), axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)
