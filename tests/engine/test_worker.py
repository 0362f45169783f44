"""The thread that runs an engine: its calls, its steps, its ends. Without an engine."""

from __future__ import annotations

import gc
import threading
import time

import pytest

from jaxinfer.engine.worker import Worker

LONG = 30.0  # seconds that nothing here takes, unless it hangs


class Machine:
    """Work that is `num_left` steps long, on a worker; `log` holds what happened."""

    def __init__(self, timeout_s=LONG):
        self.num_left, self.log, self.failures = 0, [], []
        self.num_looks = 0
        self.step = lambda: self.log.append("step")
        self.worker = Worker(
            self._step,
            self._has_work,
            on_failure=self.failures.append,
            stuck=lambda seconds, place: RuntimeError(f"{seconds:.2f} s in {place}"),
            timeout_s=timeout_s,
        )

    def _step(self):
        self.num_left -= 1
        self.step()

    def _has_work(self):
        self.num_looks += 1
        return self.num_left > 0

    def add(self, num_steps):
        def add():
            self.num_left += num_steps
            self.log.append("add")

        return self.worker.call(add)

    def stop(self):
        last = lambda: self.log.append("last")  # noqa: E731
        return self.worker.stop(last, ValueError("closed")).result(LONG)


@pytest.fixture
def machine():
    machine = Machine()
    yield machine
    machine.stop()
    machine.worker._thread.join(LONG)
    assert not machine.worker._thread.is_alive()


def test_steps_are_made_while_there_is_work(machine):
    done = threading.Event()

    def step():
        machine.log.append("step")
        if not machine.num_left:
            done.set()

    machine.step = step
    machine.add(3)
    assert done.wait(LONG)
    machine.add(0)
    machine.stop()
    assert machine.log == ["add", "step", "step", "step", "add", "last"]
    assert machine.failures == []


def test_calls_come_in_order_and_between_steps(machine):
    def step():
        machine.log.append("step begins")
        machine.worker.post(lambda: machine.log.append("posted by a step"))
        machine.log.append("step ends")

    machine.step = step
    calls = [machine.worker.call(lambda n=n: machine.log.append(n)) for n in range(20)]
    machine.add(1).result(LONG)
    assert [call.result(LONG) for call in calls] == [None] * 20
    machine.stop()
    assert machine.log == [
        *range(20),
        "add",
        "step begins",
        "step ends",
        "posted by a step",
        "last",
    ]


def test_a_call_gives_back_what_it_returns_or_raises(machine):
    def fail():
        raise KeyError("mine")

    assert machine.worker.call(lambda: 7).result(LONG) == 7
    with pytest.raises(KeyError, match="mine"):
        machine.worker.call(fail).result(LONG)
    assert machine.worker.call(threading.get_ident).result(LONG) == machine.worker._thread.ident


def test_a_call_that_is_cancelled_before_its_turn_is_not_made(machine):
    gate = threading.Event()
    machine.worker.post(gate.wait)
    cancelled, kept = machine.add(1), machine.worker.call(lambda: "kept")
    assert cancelled.cancel()
    gate.set()
    assert kept.result(LONG) == "kept"
    assert machine.log == []


def test_it_sleeps_while_there_is_nothing_to_do(machine):
    machine.add(2).result(LONG)
    machine.worker.call(lambda: None).result(LONG)
    time.sleep(0.05)
    # Two looks for each of two calls and two steps, and one before it falls asleep.
    assert machine.num_looks <= 9


def test_destructors_may_post_while_others_post():
    """Also one that the garbage collector runs in the midst of a post."""
    machine, made = Machine(), []

    class Dropped:
        def __init__(self):
            self.itself = self

        def __del__(self):
            machine.worker.post(lambda: made.append(self))

    old = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(300):
            Dropped()
            machine.worker.call(lambda: None)
    finally:
        gc.set_threshold(*old)
    gc.collect()
    machine.stop()
    assert len(made) == 300


def test_a_step_that_fails_ends_everything_with_its_error(machine):
    def step():
        raise KeyError("device lost")

    machine.step = step
    gate = threading.Event()
    machine.worker.post(gate.wait)
    added = machine.add(5)
    gate.set()
    added.result(LONG)
    machine.worker._thread.join(LONG)
    late = []
    machine.worker.post(lambda: late.append(1))
    (error,) = machine.failures
    for refused in (
        machine.worker.check,
        lambda: machine.worker.call(lambda: 1),
        machine.worker.check,
    ):
        with pytest.raises(KeyError, match="device lost") as caught:
            refused()
        assert caught.value is error
    traceback, depth = error.__traceback__, 0
    while traceback is not None:
        traceback, depth = traceback.tb_next, depth + 1
    assert depth <= 6, "each time that it was raised it grew"
    machine.stop()
    assert late == [] and "last" not in machine.log


def test_a_posted_call_that_fails_is_a_failure_too(machine):
    machine.worker.post(lambda: 1 // 0)
    machine.worker._thread.join(LONG)
    assert isinstance(machine.failures[0], ZeroDivisionError)


def test_after_a_stop_nothing_is_taken(machine):
    gate = threading.Event()
    machine.worker.post(gate.wait)
    before = machine.add(0)
    ended = machine.worker.stop(lambda: machine.log.append("last"), ValueError("closed"))
    with pytest.raises(ValueError, match="closed"):
        machine.add(1)
    gate.set()
    ended.result(LONG)
    before.result(LONG)
    machine.stop()
    assert machine.log == ["add", "last"]


@pytest.mark.parametrize("where", ["step", "call"])
def test_what_does_not_come_back_ends_it_for_all_others(where):
    machine, gate, is_stuck = Machine(timeout_s=0.2), threading.Event(), threading.Event()
    behind = []

    def block():
        behind.append(machine.worker.call(lambda: machine.log.append("too late")))
        is_stuck.set()
        gate.wait()

    try:
        if where == "step":
            machine.step, machine.num_left = block, 1
            machine.worker.post(lambda: None)  # only to wake it
        else:
            machine.worker.post(block)
        assert is_stuck.wait(LONG)
        with pytest.raises(RuntimeError, match=r"^\d+\.\d\d s in jaxinfer\.engine\.worker\."):
            behind[0].result(LONG)
        machine.stop()
        assert len(machine.failures) == 1
        assert machine.worker._thread.is_alive()
    finally:
        gate.set()
    machine.worker._thread.join(LONG)
    assert not machine.worker._thread.is_alive()
    assert machine.log == []


def test_many_steps_together_may_take_longer_than_one():
    machine, done = Machine(timeout_s=0.8), threading.Event()

    def step():
        time.sleep(0.02)
        if not machine.num_left:
            done.set()

    machine.step = step
    machine.add(45)
    assert done.wait(LONG)
    assert machine.failures == []
    machine.stop()


def test_idleness_is_not_being_stuck():
    machine = Machine(timeout_s=0.2)
    machine.add(1).result(LONG)
    time.sleep(0.3)
    machine.add(1).result(LONG)
    machine.stop()
    assert machine.failures == []
