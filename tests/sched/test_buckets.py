"""The ladder of prefill shapes and the choice among them."""

import random

import pytest

from jaxinfer.sched import pick, prefill_shapes

LADDER = ((1, 512), (1, 128), (1, 32), (2, 256), (4, 128), (8, 64))


@pytest.mark.parametrize(
    ("limits", "shapes"),
    [
        ((512, 32, 2047), LADDER),
        ((512, 3, 2047), ((1, 512), (1, 128), (1, 32), (2, 256))),
        ((2048, 32, 8191), ((1, 2048), (1, 512), (1, 128), (2, 1024), (4, 512), (8, 256))),
        ((512, 32, 63), ((1, 63), (1, 32), (2, 63), (4, 63), (8, 63))),
        ((64, 32, 2047), ((1, 64), (1, 16), (2, 32), (4, 16))),
        ((45, 4, 2047), ((1, 45), (2, 22))),
        ((7, 4, 2047), ((1, 7),)),
        ((1, 32, 2047), ((1, 1),)),
        ((512, 4, 1), ((1, 1), (2, 1), (4, 1))),
    ],
)
def test_ladder(limits, shapes):
    assert prefill_shapes(*limits) == shapes


def test_every_ladder_keeps_its_limits():
    for chunk in range(1, 140):
        for rows in (1, 2, 3, 8, 32):
            for longest in (1, 5, 16, 63, 1000):
                shapes = prefill_shapes(chunk, rows, longest)
                assert shapes[0] == (1, min(chunk, longest))
                assert len(set(shapes)) == len(shapes)
                for shape in shapes:
                    assert 1 <= shape[0] <= rows
                    assert 1 <= shape[1] <= longest
                    assert shape[0] * shape[1] <= chunk


@pytest.mark.parametrize(
    ("lengths", "shape", "indices"),
    [
        ([512], (1, 512), (0,)),
        ([5000], (1, 512), (0,)),  # cut, alone in the longest row
        ([513, 3], (1, 512), (0,)),
        ([300, 300], (1, 512), (0,)),  # not both cut to 256
        ([200, 200], (2, 256), (0, 1)),
        ([129], (1, 512), (0,)),
        ([128], (1, 128), (0,)),
        ([32], (1, 32), (0,)),
        ([1], (1, 32), (0,)),
        ([100, 100], (1, 128), (0,)),  # 4x128 half empty would be worse
        ([100] * 4, (4, 128), (0, 1, 2, 3)),
        ([60] * 9, (8, 64), tuple(range(8))),
        ([100, 5, 110, 90, 300, 128, 6], (4, 128), (0, 2, 3, 5)),  # the longest that fit
        ([250, 7, 9, 256], (2, 256), (0, 3)),
        ([5, 250, 250], (2, 256), (0, 1)),  # the first goes even where others would fill more
    ],
)
def test_pick(lengths, shape, indices):
    assert pick(LADDER, lengths) == (shape, indices)


@pytest.mark.parametrize("seed", range(3))
def test_pick_always_advances_the_first_and_never_cuts_another(seed):
    rng = random.Random(seed)
    for _ in range(300):
        shapes = prefill_shapes(rng.randint(1, 600), rng.randint(1, 32), rng.randint(1, 700))
        lengths = [rng.randint(1, rng.choice([8, 70, 900])) for _ in range(rng.randint(1, 20))]
        (rows, tokens), indices = pick(shapes, lengths)
        assert (rows, tokens) in shapes
        assert indices[0] == 0
        assert list(indices) == sorted(set(indices))
        assert len(indices) <= rows
        if any(lengths[i] > tokens for i in indices):
            assert indices == (0,)
            assert (rows, tokens) == shapes[0]
