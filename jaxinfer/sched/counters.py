"""`Counters`: what the scheduler has done so far."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Counters:
    """Totals since the scheduler was made.

    Attributes:
        added: requests accepted; finished: those over, by reason.
        preempted: how often a running request had to give its row and pages back.
        prompt_tokens: of the prompts that were admitted, each counted once.
        cached_tokens: those of them that needed no computing, as another request had done it.
        prefill_tokens: computed in prefill calls; recomputed_tokens: those of them that had been
            computed before and lost by preemption.
        padded_tokens: computed in prefill calls for nothing.
        idle_row_steps: decode steps of rows that had stopped and gave no token.
        evicted_pages: cached pages that were overwritten.
    """

    added: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    preempted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefill_tokens: int = 0
    recomputed_tokens: int = 0
    padded_tokens: int = 0
    idle_row_steps: int = 0
    evicted_pages: int = 0
