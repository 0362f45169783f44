"""`Placement`: gives each request to one of the data shards, each with a scheduler of its own."""

from __future__ import annotations

from collections.abc import Iterable

from jaxinfer.config import EngineConfig
from jaxinfer.sched.counters import Counters
from jaxinfer.sched.plan import StepPlan
from jaxinfer.sched.request import Request
from jaxinfer.sched.scheduler import Scheduler


class Placement:
    """The schedulers of all data shards, which one program serves: they step together.

    Whoever waits, waits in one queue, in the one order of precedence. The first goes where the most
    of its tokens are there or about to be computed, of equal shards where the most pages are free,
    as soon as a shard has room for it; then the next. A request that had to give way waits again in
    that queue, and may go on elsewhere.
    """

    def __init__(self, config: EngineConfig, window: int | None = None, num_shards: int = 1):
        first = Scheduler(config, window)
        shards = [first]
        while len(shards) < num_shards:
            shards.append(Scheduler(config, window, beside=shards[-1]))
        self.shards = tuple(shards)

    @property
    def counters(self) -> Counters:
        """What all have done."""
        return self.shards[0].counters

    @property
    def num_waiting(self) -> int:
        """Requests that hold no row."""
        return self.shards[0].num_waiting

    @property
    def num_running(self) -> int:
        """Requests that hold a row."""
        return sum(shard.num_running for shard in self.shards)

    @property
    def is_idle(self) -> bool:
        """Whether every request is over."""
        return self.shards[0].is_idle

    def check(self, request: Request) -> None:
        """As `Scheduler.check`: all shards are alike."""
        self.shards[0].check(request)

    def add(self, request: Request, now: float | None = None) -> None:
        """As `Scheduler.add`."""
        self.shards[0].add(request, now)

    def schedule(self, now: float | None = None) -> tuple[StepPlan, ...]:
        """The next plan of each shard; all count as dispatched from now on."""
        if len(self.shards) == 1:
            return (self.shards[0].schedule(now),)
        for shard in self.shards:
            shard.catch_up()
        self._place(now)
        most_steps = min(shard.most_steps for shard in self.shards)
        return tuple(shard.plan(most_steps) for shard in self.shards)

    def update(
        self, request: Request, new_ids: Iterable[int], now: float | None = None
    ) -> str | None:
        """As `Scheduler.update`."""
        return self.shards[request.shard].update(request, new_ids, now)

    def finish(self, request: Request, reason: str) -> int | None:
        """As `Scheduler.finish`; the row is one of the request's shard."""
        return self.shards[request.shard].finish(request, reason)

    def reset_prefix_cache(self) -> None:
        """As `Scheduler.reset_prefix_cache`."""
        for shard in self.shards:
            shard.reset_prefix_cache()

    def check_integrity(self) -> None:
        """As `Scheduler.check_integrity`."""
        for shard in self.shards:
            shard.check_integrity()

    def _place(self, now: float | None) -> None:
        """Returns None; the waiting requests run, in order, up to the first that fits nowhere."""
        waiting, placed = self.shards[0].waiting, []
        while waiting and not waiting.first.under_way:
            request = waiting.first
            rooms = [(shard.room_for(request), shard) for shard in self.shards]
            fitting = [(room, shard) for room, shard in rooms if room is not None]
            if not fitting:
                break
            _, best = max(fitting, key=lambda one: one[0])  # the first of equal ones
            waiting.remove(request)
            best.admit(request, now)
            placed.append(request)
        waiting.overtake(placed)
