"""What an observer is told: each piece of work once, in the order in which the device has it."""

import jax

from jaxinfer.engine.observer import Work

from .serving import CONFIG, GREEDY, drain, prompt_of


class Recorder:
    """Writes down what it is told."""

    def __init__(self):
        self.works, self.starts, self.num_fetched = [], [], 0

    def dispatched(self, work, results, start_s):
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(results))
        jax.block_until_ready(results)
        self.works.append(work)
        self.starts.append(start_s)

    def fetched(self, start_s):
        assert start_s >= self.starts[self.num_fetched]
        self.num_fetched += 1


def test_each_prefill_call_and_each_window_is_told_with_its_padding(make_engine):
    engine = make_engine()
    engine.observer = recorder = Recorder()
    for length in (9, 70):
        engine.add_request(prompt_of(length), GREEDY.replace(max_tokens=4, ignore_eos=True))
    drain(engine)
    prefill = [work for work in recorder.works if work.kind == "prefill"]
    decode = [work for work in recorder.works if work.kind == "decode"]
    assert sum(work.num_tokens for work in prefill) == 79
    assert all(work.shape in engine.scheduler.shards[0].shapes for work in prefill)
    assert all(work.num_tokens <= work.shape[0] * work.shape[1] for work in prefill)
    # 3 tokens of each are a window's; the first is the prefill's.
    # A window may be longer than what one of its rows has left.
    assert sum(work.num_tokens for work in decode) >= 6
    assert all(work.num_tokens == work.num_rows * work.shape[1] for work in decode)
    assert all(work.shape[0] in (1, 4, CONFIG.max_num_seqs) for work in decode)
    assert recorder.starts == sorted(recorder.starts)
    # What is read is all windows and the prefill calls that bring first tokens.
    assert len(decode) < recorder.num_fetched <= len(recorder.works)


def test_an_engine_goes_on_as_before_once_nobody_observes_it(make_engine):
    engine = make_engine()
    engine.observer = recorder = Recorder()
    engine.add_request(prompt_of(5), GREEDY.replace(max_tokens=2, ignore_eos=True))
    drain(engine)
    told = list(recorder.works)
    shape = min(engine.scheduler.shards[0].shapes)
    assert told == [Work("prefill", shape, 1, 5), Work("decode", (1, 1), 1, 1)]
    engine.observer = None
    engine.add_request(prompt_of(5), GREEDY.replace(max_tokens=2))
    drain(engine)
    assert recorder.works == told
