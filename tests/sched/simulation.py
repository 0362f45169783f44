"""What the scheduler's tests share: a device that keeps tokens where keys would stand."""

from collections import deque
from types import SimpleNamespace

from jaxinfer.config import EngineConfig
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.sched import Request, Scheduler

EOS = 0


class FakeDevice:
    """Rows that stop by themselves; emits a scripted output per request and checks what it is told.

    A row must find in its pages, as they were when it was admitted, its prompt and its output.
    Results are queued: `read` gives those of the oldest dispatch that was not read yet.
    """

    def __init__(self, config, outputs):
        self.config, self.outputs = config, outputs
        self.rows = {}
        self.covered = {}  # request id -> prompt tokens computed in its own row
        self.pages = [[None] * config.page_size for _ in range(config.cache.num_pages)]
        self.under_way = deque()

    def deactivate(self, row):
        if row is not None and row in self.rows:
            self.rows[row].is_active = False

    def dispatch(self, plan):
        for request in plan.admitted:
            assert not (request.row in self.rows and self.rows[request.row].is_active)
            self.rows[request.row] = SimpleNamespace(
                request=request, table=list(request.pages), length=0, output=[], is_active=False
            )
            self.covered[request.id] = 0
        self._prefill(plan)
        results = self._start(plan)
        for source, destination in plan.copies:
            self.pages[destination] = list(self.pages[source])
        for _, request in plan.starts:
            self._check_content(self.rows[request.row])
        self.under_way.append(results + self._decode(plan))

    def read(self):
        return self.under_way.popleft() if self.under_way else []

    def _prefill(self, plan):
        if plan.prefill:
            assert plan.shape is not None
            assert len(plan.prefill) <= plan.shape[0]
            assert plan.shape[0] * plan.shape[1] <= self.config.prefill_chunk
        assert len({chunk.request.id for chunk in plan.prefill}) == len(plan.prefill)
        for chunk in plan.prefill:
            request, row = chunk.request, self.rows[chunk.request.row]
            assert row.request is request
            assert 1 <= chunk.length <= plan.shape[1]
            assert chunk.start == self.covered[request.id] == row.length
            for token in request.known_ids(chunk.start, chunk.length):
                self._store(row, token)
            self.covered[request.id] = row.length
            assert chunk.is_last == (row.length == len(request.prompt_ids))

    def _start(self, plan):
        started = [request for _, request in plan.starts]
        assert [c.request for c in plan.prefill if c.is_last] == [
            request for request in started if self.covered[request.id]
        ]
        results = []
        for index, request in plan.starts:
            chunk, row = plan.prefill[index], self.rows[request.row]
            assert chunk.is_last and chunk.request.prompt_ids == request.prompt_ids
            assert row.request is request and not row.output
            row.length, row.is_active = len(request.prompt_ids), True
            results.append((request, self._emit(row)))
        assert len({request.id for request in started}) == len(started)
        return results

    def _decode(self, plan):
        active = {row for row in self.rows if self.rows[row].is_active}
        named = {row for row, _ in plan.decode}
        assert active <= named
        assert (plan.num_steps > 0) == bool(named)
        assert plan.num_steps <= self.config.max_window
        results = []
        for index, request in plan.decode:
            row, tokens = self.rows[index], []
            assert row.request is request
            while row.is_active and len(tokens) < plan.num_steps:
                self._store(row, row.output[-1])
                tokens += self._emit(row)
            results.append((request, tokens))
            if not row.is_active:  # what was wrong at any step still is
                self._check_content(row)
        return results

    def _emit(self, row):
        request = row.request
        token = self.outputs[request.id][len(row.output)]
        row.output.append(token)
        at_limit = len(request.prompt_ids) + len(row.output) == request.max_total_len
        row.is_active = not (at_limit or token in request.stop_ids)
        return [token]

    def _store(self, row, token):
        page, slot = divmod(row.length, self.config.page_size)
        self.pages[row.table[page]][slot] = token
        row.length += 1

    def _check_content(self, row):
        content = [token for page in row.table for token in self.pages[page]][: row.length]
        assert content == [*row.request.prompt_ids, *row.output][: row.length], row.request.id


class World:
    """A scheduler and its fake device, checked after every operation."""

    def __init__(self, config):
        self.config = config
        self.scheduler = Scheduler(config)
        self.outputs = {}
        self.device = FakeDevice(config, self.outputs)
        self.requests = {}

    def add(self, request_id, prompt_len, output=(), now=None, leader=None, **params):
        """Adds a request that would emit `output`, then 5s for ever; all prompts differ but that
        of its leader.
        """
        sampling = SamplingParams(**params)
        first = 1000 * len(self.requests) + 9
        prompt = tuple(range(first, first + prompt_len)) if leader is None else leader.prompt_ids
        request = Request(
            id=request_id,
            prompt_ids=prompt,
            params=sampling,
            seed=1,
            stop_ids=frozenset(sampling.stop_ids([EOS])),
            fork_of=leader,
        )
        self.scheduler.add(request, now)
        self.outputs[request_id] = [*output, *(5,) * (sampling.max_tokens - len(output))]
        self.requests[request_id] = request
        self.scheduler.check_integrity()
        return request

    def add_samples(self, name, prompt_len, outputs, **params):
        """Adds a leader, "name0", and its forks, "name1" on: one request per output."""
        leader = self.add(f"{name}0", prompt_len, outputs[0], **params)
        forks = [
            self.add(f"{name}{i}", prompt_len, output, leader=leader, **params)
            for i, output in enumerate(outputs[1:], 1)
        ]
        return [leader, *forks]

    def cancel(self, request_id):
        self.device.deactivate(self.scheduler.cancel(request_id))
        self.scheduler.check_integrity()

    def step(self, now=None):
        """One turn of the loop: plan, dispatch, then read what the plan before gave."""
        plan = self.scheduler.schedule(now)
        self.scheduler.check_integrity()
        late = 0 if plan.is_empty else 1
        self.device.dispatch(plan)
        while len(self.device.under_way) > late:
            for request, tokens in self.device.read():
                self.scheduler.update(request, tokens, now)
                self.scheduler.check_integrity()
        return plan

    def run(self, limit=5000):
        plans = []
        while not self.scheduler.is_idle:
            plans.append(self.step())
            assert len(plans) < limit
        assert self.scheduler.pool.num_free == self.scheduler.pool.num_pages
        return plans

    def expected(self, request):
        """The output and finish reason that a correct engine gives."""
        limit = min(request.params.max_tokens, self.config.max_model_len - len(request.prompt_ids))
        output = self.outputs[request.id][:limit]
        for position, token in enumerate(output):
            if token in request.stop_ids:
                return output[: position + 1], "stop"
        return output, "length"

    def check_results(self, cancelled=()):
        """Asserts that every request got its output, those cancelled the beginning of theirs."""
        for request in self.requests.values():
            output, reason = self.expected(request)
            if request.id in cancelled:
                assert request.finish_reason == "cancelled"
                assert request.output_ids == output[: len(request.output_ids)]
            else:
                assert (request.output_ids, request.finish_reason) == (output, reason)


def config(**changes):
    return EngineConfig(**{"max_model_len": 64, "max_num_seqs": 4, "page_size": 16} | changes)


def shown(plan):
    """A plan as plain values."""
    return SimpleNamespace(
        admitted=[(r.id, r.row, tuple(r.pages)) for r in plan.admitted],
        shape=plan.shape,
        prefill=[(c.request.id, c.start, c.length, c.is_last) for c in plan.prefill],
        starts=[(index, request.id) for index, request in plan.starts],
        copies=plan.copies,
        decode=[(row, request.id) for row, request in plan.decode],
        num_steps=plan.num_steps,
    )
