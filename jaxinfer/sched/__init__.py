"""Host-side scheduling: which request holds which row and pages, and what each step computes."""

from jaxinfer.sched.buckets import pick, prefill_shapes
from jaxinfer.sched.logprobs import TokenLogprobs
from jaxinfer.sched.page_pool import PagePool
from jaxinfer.sched.request import Request, Status
from jaxinfer.sched.scheduler import Chunk, Scheduler, StepPlan

__all__ = [
    "Chunk",
    "PagePool",
    "Request",
    "Scheduler",
    "Status",
    "StepPlan",
    "TokenLogprobs",
    "pick",
    "prefill_shapes",
]
