"""Which requests are refused at once, as they could never run."""

from __future__ import annotations

from jaxinfer.config import EngineConfig, require
from jaxinfer.sched.allocation import PageAllocator
from jaxinfer.sched.request import Request


def max_total_len(request: Request, config: EngineConfig, pages: PageAllocator) -> int:
    """Most tokens, prompt and output, that `request` can have.

    Raises ValueError if it has an empty prompt, no room for one output token, or could not even
    run alone.
    """
    name, limit, num_prompt = f"Request {request.id!r}", config.max_model_len, request.num_known
    require(num_prompt > 0, f"{name} has an empty prompt. Give it at least one token.")
    require(
        num_prompt < limit,
        f"{name} has a prompt of {num_prompt} tokens; max_model_len={limit} leaves room for "
        f"{limit - 1} and one output. Shorten the prompt or raise max_model_len.",
    )
    most = min(num_prompt + request.params.max_tokens, limit)
    needed, num_pages = pages.most_held(most - 1), pages.pool.num_pages
    require(
        needed <= num_pages,
        f"{name} needs {needed} pages of {config.page_size} tokens for its {most}; the pool has "
        f"{num_pages}. Shorten the prompt, lower max_tokens or raise num_pages.",
    )
    return most
