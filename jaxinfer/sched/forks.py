"""Samples of one prompt: the leader computes it, and its siblings fork from it.

A fork holds the pages that the prompt fills together with its leader, and the rest for itself. The
page that the prompt fills only in part is copied, since both go on to write to it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from jaxinfer.sched.request import Request, Status

PENDING = (Status.WAITING, Status.PREFILL)  # the prompt is not computed yet


def follow(request: Request, *, is_under_way: bool) -> None:
    """Returns None; `request` waits for its leader, or for none if that one is not under way or has
    computed its prompt already.
    """
    leader = request.fork_of
    if leader is None or not is_under_way or leader.status not in PENDING:
        request.fork_of = None
        return
    assert leader.fork_of is None, f"{request.id} follows {leader.id}, which follows another"
    assert leader.prompt_ids == request.prompt_ids, f"{leader.id} has another prompt: {request.id}"
    leader.forks.append(request)


def appoint(siblings: Sequence[Request]) -> None:
    """Returns None; the first of the siblings is now the leader of the others."""
    for leader in siblings[:1]:
        leader.fork_of, leader.forks = None, [*siblings[1:]]
    for request in siblings[1:]:
        request.fork_of = siblings[0]


def leave(request: Request) -> None:
    """Returns None; `request` waits for no leader, and the siblings that wait for it go on without
    it.
    """
    if request.fork_of is not None and request in request.fork_of.forks:
        request.fork_of.forks.remove(request)
    appoint(request.forks)
    request.forks = []


def shared_pages(request: Request, page_size: int) -> list[int]:
    """The pages that `request` is to hold together with its leader: those that the prompt fills."""
    if request.fork_of is None:
        return []
    return request.fork_of.pages[: len(request.prompt_ids) // page_size]


def fork(leader: Request, page_size: int) -> tuple[list[Request], list[tuple[int, int]]]:
    """`(forks, copies)`: the siblings that go on from where the prompt of `leader` ends, and the
    (source, destination) pages that this takes.

    Those that still wait for a row come too late: the first of them leads the others.
    """
    forks = [request for request in leader.forks if request.row is not None]
    appoint([request for request in leader.forks if request.row is None])
    leader.forks = []
    for request in forks:
        request.num_computed, request.status = len(request.prompt_ids), Status.DECODE
    num_full, rest = divmod(len(leader.prompt_ids), page_size)
    copies = [(leader.pages[num_full], request.pages[num_full]) for request in forks if rest]
    return forks, copies


def check_forks(requests: Sequence[Request], page_size: int) -> None:
    """Returns None if siblings alone share pages, and only those that their prompt fills, and if
    who waits for a leader is known to it; AssertionError otherwise.

    So what a request writes after its prompt, it writes to pages of its own.
    """
    holders, waiting = defaultdict(list), defaultdict(list)
    for request in requests:
        for index, page in enumerate(request.pages):
            holders[page].append((request, index))
        if request.fork_of is not None and request.status in PENDING:
            waiting[request.fork_of].append(request)
    for page, holds in holders.items():
        for request, index in holds if len(holds) > 1 else ():
            other, place = holds[0]
            assert (request.fork_of or request) is (other.fork_of or other), f"{page}: no siblings"
            assert request.prompt_ids == other.prompt_ids, f"{page}: different prompts"
            assert index == place < len(request.prompt_ids) // page_size, f"{page}: not the prompt"
    for request in requests:
        siblings = waiting.pop(request, [])
        assert request.forks == siblings, f"{request.id} does not know who waits for it"
        is_leader = request.fork_of is None and request.status in PENDING
        assert is_leader or not siblings, f"{request.id} leads as {request.status}"
        for sibling in siblings:
            shared = shared_pages(sibling, page_size)
            assert sibling.pages[: len(shared)] in ([], shared), f"{sibling.id}: not the leader's"
    assert not waiting, f"a leader is over: {waiting}"
