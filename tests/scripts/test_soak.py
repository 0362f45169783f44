"""The soak test can fail, and its traffic is of every kind."""

import asyncio

import pytest

from scripts import soak

from ..documents import write_model


def checks(memory, costs, start_s=120.0):
    return [
        soak.Check(start_s + 30 * i, resident, cost, 2.0)
        for i, (resident, cost) in enumerate(zip(memory, costs))
    ]


def test_growth_and_drift_are_those_of_the_last_third_after_the_start():
    flat = checks([100] * 9, [3.0] * 9)
    assert soak.verdict(flat) == (0.0, 0.0)
    grown = checks([100, 100, 101, 105, 105, 105, 110, 110, 999], [1, 2, 9, 3, 3, 3, 4, 4, 3])
    assert soak.verdict(grown) == pytest.approx((0.10, 1.0))
    early = checks([1, 50], [9.0, 9.0], start_s=0.0)
    assert soak.verdict([*early, *flat]) == (0.0, 0.0)
    with pytest.raises(ValueError, match="2 checks after 120"):
        soak.verdict(flat[:2])


@pytest.mark.parametrize(
    ("memory", "costs", "code"),
    [
        ([100] * 9, [2.0] * 9, 0),
        ([100] * 6 + [102] * 3, [2.0] * 9, 1),
        ([100] * 9, [2.0] * 6 + [2.3] * 3, 1),
        ([100] * 6 + [90] * 3, [2.0] * 6 + [1.0] * 3, 0),
    ],
)
def test_the_exit_code_is_1_if_anything_grows(monkeypatch, memory, costs, code):
    async def found(args):
        return checks(memory, costs)

    monkeypatch.setattr(soak, "soak", found)
    assert soak.main([]) == code


@pytest.mark.slow
def test_a_short_run_serves_every_kind_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    write_model(tmp_path / "model")
    small = soak.ENGINE | {"max_num_seqs": 4, "prefill_chunk": 64, "max_model_len": 448}
    monkeypatch.setattr(soak, "ENGINE", small | {"num_pages": 28})
    found, done = [], []

    async def check(llm, pure, rng, vocab_size, start_s):
        found.append(await real_check(llm, pure, rng, vocab_size, start_s))
        return found[-1]

    class Traffic(soak.Traffic):
        def __init__(self, *args):
            super().__init__(*args)
            done.append(self.done)

    real_check = soak.check
    monkeypatch.setattr(soak, "check", check)
    monkeypatch.setattr(soak, "Traffic", Traffic)
    argv = ["--model", str(tmp_path / "model"), "--dtype", "float32", "--minutes", "0.05"]
    soak.main([*argv, "--period", "0.7", "--settle", "0"])
    assert len(found) >= 3 and all(one.engine_s > 0 and one.pure_s > 0 for one in found)
    assert set(done[0]) >= {"whole", "leave", "bad"} and sum(done[0].values()) >= 20
    assert "resident memory" in capsys.readouterr().out


def test_what_is_wrong_with_the_pages_ends_it():
    class Leaking:
        async def check_integrity(self):
            pass

        async def metrics(self):
            return {"pages_held": 1, "num_running": 0, "num_waiting": 0}

    with pytest.raises(AssertionError, match="pages_held"):
        asyncio.run(soak.check(Leaking(), None, None, 10, 0.0))
