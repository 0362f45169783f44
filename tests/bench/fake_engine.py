"""An engine without a model, whose steps take a second of a clock that nobody waits for."""

from types import SimpleNamespace

from jaxinfer import EngineConfig
from jaxinfer.bench.counters import TOTALS


class FakeClock:
    """A clock that stands still until someone sleeps."""

    def __init__(self, now=100.0):
        self.now = now
        self.slept = []

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


class FakeEngine:
    """Two rows; a step gives each request that has one its first token, or its next two.

    A step takes 1 s, for 0.75 s of which the host waits. `sent` are the requests, `most` is how
    many were under way at the same time.
    """

    def __init__(self, clock, num_pages=64):
        self.config = EngineConfig(
            max_model_len=64, max_num_seqs=2, page_size=8, num_pages=num_pages, max_window=2
        )
        self.num_valid_ids = 1000
        self.wait_s = 5.0
        self.sent, self.most = [], 0
        self.cut = set()  # prompts that end before their time
        self.pool = SimpleNamespace(num_pages=num_pages, num_held=0)
        self.scheduler = SimpleNamespace(num_waiting=0, shards=(SimpleNamespace(pool=self.pool),))
        self.num_steps = 3
        self._clock = clock
        self._requests = []

    def add_request(self, prompt, params, priority=0):
        request = SimpleNamespace(
            id=str(len(self.sent)),
            prompt=prompt,
            params=params,
            priority=priority,
            num_left=params.max_tokens,
            times=SimpleNamespace(first_scheduled=None),
        )
        self.sent.append((self._clock.now, request))
        self._requests.append(request)
        self.most = max(self.most, len(self._requests))
        return request

    def metrics(self):
        return dict.fromkeys(TOTALS, 0) | {"fetches": self.num_steps, "num_running": 1}

    def step(self):
        running = self._requests[:2]
        for request in running:
            if request.times.first_scheduled is None:
                request.times.first_scheduled = self._clock.now
        self._clock.now += 1.0
        self.wait_s += 0.75
        self.num_steps += 1
        outputs = []
        for request in running:
            is_first = request.num_left == request.params.max_tokens
            count = min(1 if is_first else 2, request.num_left)
            request.num_left -= count
            is_cut = tuple(request.prompt) in self.cut
            reason = "error" if is_cut else None if request.num_left else "length"
            outputs.append(
                SimpleNamespace(request=request, new_ids=(7,) * count, finish_reason=reason)
            )
            if reason is not None:
                self._requests.remove(request)
        self.scheduler.num_waiting = max(len(self._requests) - 2, 0)
        self.pool.num_held = 3 * len(self._requests)
        return outputs
