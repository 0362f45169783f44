"""What the scheduler's tests share: a device that keeps tokens where keys would stand."""

from collections import deque
from types import SimpleNamespace

from jaxinfer.config import EngineConfig
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.sched import Request, Scheduler, Status

EOS = 0


def key_of(previous, token, weights=0):
    """What a slot holds: it tells the token, all tokens before it, and the weights."""
    return hash((previous, token, weights))


def sampled(request, position, key, num_ids):
    """A token that follows from the seed, the position and all tokens before."""
    return hash((request.seed, position, key, 7)) % num_ids


class FakeDevice:
    """Rows that stop by themselves; they find in their pages exactly their own tokens, or fail.

    A row produces the output that is written for its request in `outputs`, or else tokens that
    follow from what its pages hold. Results are queued: `read` gives those of the oldest dispatch
    that was not read yet.
    """

    def __init__(self, config, outputs, window=None, num_ids=40):
        self.config, self.outputs, self.window, self.num_ids = config, outputs, window, num_ids
        self.weights = 0
        self.rows = {}
        self.covered = {}  # request id -> tokens computed in its own row, over all its lives
        self.pages = [[None] * config.page_size for _ in range(config.cache.num_pages)]
        self.under_way = deque()

    def deactivate(self, row):
        if row is not None and row in self.rows:
            self.rows[row].is_active = False

    def dispatch(self, plan):
        for row, request in plan.preempted:
            assert self.rows[row].request is request
            self.deactivate(row)
        for request in plan.admitted:
            self._write(request)
        for row, index, page in plan.mapped:
            assert self.rows[row].table[index] is None
            self.rows[row].table[index] = page
        self._prefill(plan)
        self._copy(plan)
        self.under_way.append(self._start(plan) + self._decode(plan))

    def read(self):
        return self.under_way.popleft() if self.under_way else []

    def skip(self, index, position):
        """Counts as computed what the row has from another before the weights change."""
        row = self.rows[index]
        if not row.is_active and len(row.keys) < position <= len(row.tokens):
            self._skip(row, position)

    def _write(self, request):
        assert not (request.row in self.rows and self.rows[request.row].is_active)
        table = [*request.pages, *[None] * (self.config.pages_per_seq - len(request.pages))]
        self.rows[request.row] = SimpleNamespace(
            request=request,
            table=table,
            tokens=list(request.known_ids(0, request.num_known)),
            keys=[],  # of the tokens computed so far
            is_active=False,
        )
        self.covered.setdefault(request.id, 0)

    def _prefill(self, plan):
        if plan.prefill:
            assert plan.shape is not None
            assert len(plan.prefill) <= plan.shape[0]
            assert plan.shape[0] * plan.shape[1] <= self.config.prefill_chunk
        assert len({chunk.request.id for chunk in plan.prefill}) == len(plan.prefill)
        for chunk in plan.prefill:
            request, row = chunk.request, self.rows[chunk.request.row]
            assert row.request is request and not row.is_active
            assert 1 <= chunk.length <= plan.shape[1]
            self._skip(row, chunk.start)
            for token in request.known_ids(chunk.start, chunk.length):
                self._store(row, token)
            self.covered[request.id] += chunk.length
            assert chunk.is_last == (len(row.keys) == len(row.tokens))
            self._check(row)

    def _copy(self, plan):
        assert not {source for source, _ in plan.copies} & {to for _, to in plan.copies}
        for source, destination in plan.copies:
            self.pages[destination] = list(self.pages[source])

    def _start(self, plan):
        started = [request for _, request in plan.starts]
        assert len({request.id for request in started}) == len(started)
        assert {c.request for c in plan.prefill if c.is_last} <= set(started)
        results = []
        for index, request in plan.starts:
            chunk, row = plan.prefill[index], self.rows[request.row]
            assert row.request is request and not row.is_active
            assert chunk.is_last and self.rows[chunk.request.row].tokens[: len(row.tokens)] == (
                row.tokens
            )
            self._skip(row, len(row.tokens))
            self._check(row)
            row.is_active = True
            results.append((request, [self._emit(row)]))
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
                self._store(row, row.tokens[-1])
                tokens.append(self._emit(row))
            results.append((request, tokens))
            if tokens:  # what was wrong at any step still is; one that stopped before reads nothing
                self._check(row)
        return results

    def _emit(self, row):
        """The next token of `row`, from what the page of its newest one holds."""
        request, position = row.request, len(row.tokens)
        assert len(row.keys) == position
        if request.id in self.outputs:
            token = self.outputs[request.id][position - len(request.prompt_ids)]
        else:
            token = sampled(request, position, self._slots(row)[-1], self.num_ids)
        row.tokens.append(token)
        row.is_active = not (position + 1 == request.max_total_len or token in request.stop_ids)
        return token

    def _store(self, row, token):
        page, slot = divmod(len(row.keys), self.config.page_size)
        row.keys.append(key_of(row.keys[-1] if row.keys else 0, token, self.weights))
        self.pages[row.table[page]][slot] = row.keys[-1]

    def _skip(self, row, position):
        """Counts what another row computed; `_check` finds out whether the pages hold it."""
        assert len(row.keys) <= position
        while len(row.keys) < position:
            previous = row.keys[-1] if row.keys else 0
            row.keys.append(key_of(previous, row.tokens[len(row.keys)], self.weights))

    def _slots(self, row):
        """What `row` finds in its pages, as far back as its queries see."""
        size, end = self.config.page_size, len(row.keys)
        first = 0 if self.window is None else max(end - self.window, 0) // size
        slots = [slot for page in row.table[first : -(-end // size)] for slot in self.pages[page]]
        start = 0 if self.window is None else max(end - self.window, 0)
        return slots[start - first * size : end - first * size]

    def _check(self, row):
        slots = self._slots(row)
        assert slots == row.keys[len(row.keys) - len(slots) :], row.request.id


class World:
    """A scheduler and its fake device, checked after every operation."""

    def __init__(self, config, window=None, num_ids=40):
        self.config = config
        self.scheduler = Scheduler(config, window)
        self.outputs = {}
        self.device = FakeDevice(config, self.outputs, window, num_ids)
        self.requests = {}

    def add(self, request_id, prompt_len, output=(), now=None, like=None, **params):
        """Adds a request that would emit `output`, then 5s for ever; all prompts differ but that
        of the request that it is `like`.
        """
        first = 1000 * len(self.requests) + 9
        prompt = tuple(range(first, first + prompt_len)) if like is None else like.prompt_ids
        max_tokens = SamplingParams(**params).max_tokens
        self.outputs[request_id] = [*output, *(5,) * (max_tokens - len(output))]
        try:
            return self.put(request_id, prompt, now=now, **params)
        except ValueError:
            del self.outputs[request_id]
            raise

    def put(self, request_id, prompt, now=None, seed=1, priority=0, **params):
        """Adds a request of that prompt; its output follows from what it finds in its pages."""
        sampling = SamplingParams(**params)
        request = Request(
            id=request_id,
            prompt_ids=tuple(prompt),
            params=sampling,
            seed=seed,
            priority=priority,
            stop_ids=frozenset(sampling.stop_ids([EOS])),
        )
        self.scheduler.add(request, now)
        self.requests[request_id] = request
        self.scheduler.check_integrity()
        return request

    def add_samples(self, name, prompt_len, outputs, **params):
        """Adds requests of one prompt, "name0", "name1" and so on: one per output."""
        first = self.add(f"{name}0", prompt_len, outputs[0], **params)
        others = [
            self.add(f"{name}{i}", prompt_len, output, like=first, **params)
            for i, output in enumerate(outputs[1:], 1)
        ]
        return [first, *others]

    def cancel(self, request_id):
        self.device.deactivate(self.scheduler.cancel(request_id))
        self.scheduler.check_integrity()

    def step(self, now=None):
        """One turn of the loop: plan, dispatch, then read what the plan before gave."""
        (plan,) = self.scheduler.schedule(now)
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
        assert (
            self.scheduler.shards[0].pool.num_available == self.scheduler.shards[0].pool.num_pages
        )
        return plans

    def expected(self, request):
        """The output and finish reason that a correct engine gives."""
        num_prompt, output, key = len(request.prompt_ids), [], 0
        for token in request.prompt_ids:
            key = key_of(key, token, self.device.weights)
        limit = min(request.params.max_tokens, self.config.max_model_len - num_prompt)
        while len(output) < limit:
            if request.id in self.outputs:
                token = self.outputs[request.id][len(output)]
            else:
                token = sampled(request, num_prompt + len(output), key, self.device.num_ids)
            output.append(token)
            if token in request.stop_ids:
                return output, "stop"
            key = key_of(key, token, self.device.weights)
        return output, "length"

    def check_results(self, cancelled=()):
        """Asserts that every request got its output, those cancelled the beginning of theirs."""
        for request in self.requests.values():
            assert request.status is Status.FINISHED
            output, reason = self.expected(request)
            if request.id in cancelled:
                assert request.finish_reason == "cancelled"
                assert request.output_ids == output[: len(request.output_ids)]
            else:
                assert (request.output_ids, request.finish_reason) == (output, reason)

    @property
    def num_computed(self):
        """Tokens computed in prefill calls, in all rows together."""
        return sum(self.device.covered.values())


def config(**changes):
    return EngineConfig(**{"max_model_len": 64, "max_num_seqs": 4, "page_size": 16} | changes)


def shown(plan):
    """A plan as plain values."""
    return SimpleNamespace(
        preempted=[(row, r.id) for row, r in plan.preempted],
        admitted=[(r.id, r.row, tuple(r.pages)) for r in plan.admitted],
        mapped=plan.mapped,
        shape=plan.shape,
        prefill=[(c.request.id, c.start, c.length, c.is_last) for c in plan.prefill],
        starts=[(index, request.id) for index, request in plan.starts],
        copies=plan.copies,
        decode=[(row, request.id) for row, request in plan.decode],
        num_steps=plan.num_steps,
    )
