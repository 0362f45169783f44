"""Frequencies against values from the published formulas, phases at long positions."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.compute.rope import apply_rope, inverse_frequencies, rope_phases
from jaxinfer.config import RopeConfig


def ratios(rope: RopeConfig, max_position=131072) -> np.ndarray:
    """Frequencies divided by the plain ones."""
    plain = rope.theta ** (-np.arange(0, rope.dim, 2) / rope.dim)
    return inverse_frequencies(rope, max_position)[0] / plain


@pytest.mark.parametrize(
    "factor, blended",
    [(8.0, (0.643743, 0.371122, 0.190211)), (32.0, (0.605573, 0.303743, 0.103448))],
)
def test_llama3_keeps_blends_and_divides(factor, blended):
    rope = RopeConfig(
        kind="llama3",
        theta=5e5,
        dim=64,
        factor=factor,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position=8192,
    )
    got = ratios(rope)
    np.testing.assert_allclose(got[:15], 1.0, rtol=1e-6)
    np.testing.assert_allclose(got[15:18], blended, atol=2e-6)
    np.testing.assert_allclose(got[18:], 1 / factor, rtol=1e-6)


def test_linear_divides_every_frequency():
    np.testing.assert_allclose(ratios(RopeConfig(kind="linear", factor=4.0)), 0.25, rtol=1e-6)


def test_yarn_interpolates_only_slow_frequencies_and_scales_attention():
    rope = RopeConfig(kind="yarn", theta=1e4, dim=64, factor=16.0, original_max_position=4096)
    got = ratios(rope)
    # The dimension whose wave turns r times in the original context: d ln(L / 2 pi r) / (2 ln
    # theta).
    low = math.floor(64 * math.log(4096 / (2 * math.pi * 32)) / (2 * math.log(1e4)))
    high = math.ceil(64 * math.log(4096 / (2 * math.pi)) / (2 * math.log(1e4)))
    np.testing.assert_allclose(got[: low + 1], 1.0, rtol=1e-6)
    np.testing.assert_allclose(got[high:], 1 / 16, rtol=1e-6)
    assert (np.diff(got[low : high + 1]) < 0).all()
    assert inverse_frequencies(rope, 65536)[1] == pytest.approx(0.1 * math.log(16) + 1)


def test_longrope_takes_long_factors_beyond_the_original_context():
    rope = RopeConfig(
        kind="longrope",
        dim=4,
        factor=32.0,
        original_max_position=4096,
        short_factor=(1.0, 2.0),
        long_factor=(3.0, 5.0),
    )
    np.testing.assert_allclose(ratios(rope, 4096), [1, 1 / 2], rtol=1e-6)
    np.testing.assert_allclose(ratios(rope, 131072), [1 / 3, 1 / 5], rtol=1e-6)
    want = math.sqrt(1 + math.log(32) / math.log(4096))
    for length in (4096, 131072):
        assert inverse_frequencies(rope, length)[1] == pytest.approx(want)


@pytest.mark.parametrize("position", [100, 4095, 32769, 131072])
def test_phases_are_float32_at_long_positions(position):
    """Frequencies rounded to bfloat16 give a cosine error of 1.68 at 4095; float32 stays below
    1e-2.
    """
    rope = RopeConfig(theta=1e4, dim=128)
    _, cos = rope_phases(rope, 131072, jnp.array([[position]]))
    want = np.cos(position * 1e4 ** (-np.arange(64) / 64))
    assert np.abs(np.asarray(cos[0, 0], np.float64) - want).max() < 1e-2


def test_rotation_pairs_the_halves_and_leaves_the_rest_alone():
    rope = RopeConfig(theta=100.0, dim=4)
    x = np.random.default_rng(0).standard_normal((1, 2, 1, 1, 6)).astype(np.float32)
    got = np.asarray(apply_rope(jnp.asarray(x), rope_phases(rope, 64, jnp.array([[0, 3]]))))
    np.testing.assert_allclose(got[0, 0], x[0, 0], rtol=1e-6)  # position 0: no turn
    for i, angle in enumerate((3.0, 0.3)):
        turned = complex(x[0, 1, 0, 0, i], x[0, 1, 0, 0, i + 2]) * np.exp(1j * angle)
        assert got[0, 1, 0, 0, i] == pytest.approx(turned.real, abs=1e-5)
        assert got[0, 1, 0, 0, i + 2] == pytest.approx(turned.imag, abs=1e-5)
    np.testing.assert_array_equal(got[..., 4:], x[..., 4:])


def test_unknown_kinds_and_bad_sizes_are_refused():
    with pytest.raises(ValueError, match="'ntk' is unknown. Known: default, linear, llama3"):
        RopeConfig(kind="ntk")
    with pytest.raises(ValueError, match="dim=5 must be positive and even"):
        RopeConfig(dim=5)
    with pytest.raises(ValueError, match="short_factor has 1 values; longrope of dim=4 needs 2"):
        RopeConfig(kind="longrope", dim=4, short_factor=(1.0,), long_factor=(1.0, 1.0))
