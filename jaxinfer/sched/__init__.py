"""Host-side scheduling: which request holds which row and pages, and what each step computes."""

from jaxinfer.sched.buckets import pick, prefill_shapes
from jaxinfer.sched.counters import Counters
from jaxinfer.sched.logprobs import TokenLogprobs
from jaxinfer.sched.page_pool import PagePool
from jaxinfer.sched.plan import Chunk, StepPlan
from jaxinfer.sched.prefix_cache import PrefixCache
from jaxinfer.sched.request import Request, Status
from jaxinfer.sched.scheduler import Scheduler

__all__ = [
    "Chunk",
    "Counters",
    "PagePool",
    "PrefixCache",
    "Request",
    "Scheduler",
    "Status",
    "StepPlan",
    "TokenLogprobs",
    "pick",
    "prefill_shapes",
]
