"""Whose KV a request's may begin with: that of another session which begins with the same tokens.

    a resident         its tokens' KV is there
    a turn that runs   what it has computed is there, until its answer's KV is kept or released. A
                       request of which it computes most waits until it has: when many come with
                       one prompt at the same time, the first of them computes it; so does one of
                       whose prompt a copy is under way

It is copied; where slots are pages, these are both sessions'.

Waiting costs nothing but that: prompts are computed in the order of admission, so that who waits
comes behind the other's prompt anyway. Nobody waits for a turn of lower priority, nor for one that
has a history beyond the tokens in question to load first.

*Source:* RadixAttention: SGLang (NeurIPS'24).
"""

from typing import NamedTuple

from inference_svc.core.attention_window import is_whole
from inference_svc.core.scheduling.request import ActiveRequests, Request, RequestState
from inference_svc.core.scheduling.residents import Resident, Residents
from inference_svc.core.scheduling.slot_budget import SlotBudget
from inference_svc.core.scheduling.start_gate import StartGate
from inference_svc.core.scheduling.step_plan import SchedulerLimits


class SharedPrefix(NamedTuple):
    """First tokens of a request whose KV another session has."""

    source: Resident | Request
    num_tokens: int


class SharedPrefixes:
    """See the module docstring."""

    def __init__(
        self,
        limits: SchedulerLimits,
        active: ActiveRequests,
        residents: Residents,
        slots: SlotBudget,
        gate: StartGate,
    ) -> None:
        self._limits = limits
        self._active = active
        self._residents = residents
        self._slots = slots
        self._gate = gate

    def best(self, request: Request) -> SharedPrefix | None:
        """Find the longest prefix that is of use to a request; None: there is none.

        It is not where it has less than the session's own history, which the store likely has, nor
        where it has no block: part of one could not be saved anew.
        """
        if not self._may_share(request):
            return None
        found = [self._of_resident(request), self._of_running(request)]
        usable = (one for one in found if one is not None and self._is_whole(*one))
        best = max(usable, key=_num_tokens, default=None)
        return best if best is not None and best.num_tokens >= self._least(request) else None

    def is_coming(self, request: Request) -> bool:
        """Whether a request is to wait until a turn that is under way has computed its prefix."""
        if not self._may_share(request):
            return False
        leader, num_common = self._active.longest_prefix(request) or (None, 0)
        if leader is None:
            return False
        if leader.computed_tokens >= num_common and not self._gate.is_copied(leader):
            return False
        num_tokens = self._aligned(leader, num_common)
        is_worth_it = (
            num_tokens >= self._least(request)
            and 2 * num_tokens >= len(request.token_ids)
            and leader.history_tokens <= num_common
            and leader.priority >= request.priority
            and self._is_whole(leader, num_tokens)
        )
        if not is_worth_it:
            return False
        best = self.best(request)
        return best is None or best.num_tokens < num_tokens

    def _may_share(self, request: Request) -> bool:
        limits = self._limits
        return request.may_share and limits.keeps_residents and not limits.has_states

    def _least(self, request: Request) -> int:
        """Return how many tokens a prefix must have to be of use."""
        block_tokens = max(self._limits.block_tokens, self._limits.page_tokens or 1)
        return max(block_tokens, request.history_tokens, request.computed_tokens)

    def _is_whole(self, source: Resident | Request, num_tokens: int) -> bool:
        return is_whole(num_tokens, source.window_from, self._limits.attention_window)

    def _of_resident(self, request: Request) -> SharedPrefix | None:
        found = self._residents.shared_prefix(request)
        if found is None:
            return None
        resident, num_tokens = found
        return SharedPrefix(resident, self._slots.whole_pages(num_tokens))

    def _of_running(self, request: Request) -> SharedPrefix | None:
        """Find what a turn has computed that runs, or is just answered."""
        found = self._active.longest_prefix(request, self._is_certain)
        if found is None:
            return None
        leader, num_common = found
        num_tokens = min(num_common, leader.computed_tokens)
        return SharedPrefix(leader, self._aligned(leader, num_tokens))

    def _is_certain(self, leader: Request) -> bool:
        """Whether what a turn has computed is good: its load cannot fail any more."""
        return leader.state is RequestState.FINISHED or self._gate.is_certain(leader)

    def _aligned(self, leader: Request, num_tokens: int) -> int:
        """Return the end of whole pages and whole blocks at or before a token."""
        page_tokens, block_tokens = self._slots.account.page_tokens, self._limits.block_tokens
        last = self._slots.whole_pages(num_tokens)
        ends = range(last, max(0, last - page_tokens * block_tokens), -page_tokens)
        return next((end for end in ends if (end - leader.boundary) % block_tokens == 0), 0)


def _num_tokens(prefix: SharedPrefix) -> int:
    return prefix.num_tokens
