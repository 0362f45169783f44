import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.compute import noise


def test_fold_in_equals_that_of_jax_random():
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 2**32, (20, 2), dtype=np.uint32)
    data = rng.integers(0, 2**31, 20, dtype=np.int32)
    ours = np.stack(jax.jit(noise.fold_in)((keys[:, 0], keys[:, 1]), data), axis=1)
    typed = jax.random.wrap_key_data(keys, impl="threefry2x32")
    theirs = jax.random.key_data(jax.vmap(jax.random.fold_in)(typed, data))
    np.testing.assert_array_equal(ours, theirs)


def test_noise_of_an_id_does_not_depend_on_its_company():
    vocab, rows = 4999, 6
    rng = np.random.default_rng(1)
    keys = rng.integers(0, 2**32, (rows, 2), dtype=np.uint32)
    at = np.arange(rows, dtype=np.int32)
    gumbel = jax.jit(noise.gumbel, static_argnums=3)
    everything = np.asarray(gumbel(keys, at, np.arange(vocab, dtype=np.int32)[None], noise.SAMPLE))
    some = np.stack([rng.permutation(vocab)[:64] for _ in range(rows)]).astype(np.int32)
    few = np.asarray(gumbel(keys, at, some, noise.SAMPLE))
    np.testing.assert_array_equal(few, np.take_along_axis(everything, some, axis=1))
    shard = np.arange(2000, 2333, dtype=np.int32)[None]
    np.testing.assert_array_equal(
        np.asarray(gumbel(keys[2:3], at[2:3], shard, noise.SAMPLE))[0], everything[2, 2000:2333]
    )


def test_noise_differs_by_key_position_and_purpose():
    ids = np.arange(100, dtype=np.int32)[None]

    def make(key, position, purpose):
        noises = noise.gumbel(np.uint32([key]), np.int32([position]), ids, purpose)
        return np.asarray(noises)[0]

    base = make([1, 2], 3, 0)
    for other in (make([1, 3], 3, 0), make([0, 2], 3, 0), make([1, 2], 4, 0), make([1, 2], 3, 1)):
        assert (base != other).all()


def test_noise_is_standard_gumbel():
    ids = np.arange(1_000_000, dtype=np.int32)[None]
    x = np.asarray(noise.gumbel(np.uint32([[3, 4]]), np.int32([0]), ids, noise.SAMPLE))[0]
    assert np.isfinite(x).all()
    assert abs(x.mean() - 0.5772) < 0.005
    assert abs(x.var() - np.pi**2 / 6) < 0.01
    for q in (0.001, 0.5, 0.999):
        assert abs((x < -np.log(-np.log(q))).mean() - q) < 4 * np.sqrt(q * (1 - q) / x.size)


def test_noise_is_finite_at_both_ends_of_the_counter(monkeypatch):
    def extremes(key, data):
        bits = jnp.uint32([0, 1, 2**31, 2**32 - 1])
        return jnp.broadcast_to(bits, jnp.broadcast_shapes(key[0].shape, data.shape)), data

    monkeypatch.setattr(noise, "fold_in", extremes)
    x = noise.gumbel(jnp.zeros((4, 2), jnp.uint32), jnp.zeros(4, jnp.int32), jnp.zeros((4, 4)), 0)
    assert np.isfinite(x).all() and x.max() > 22 and x.min() < -2.7
