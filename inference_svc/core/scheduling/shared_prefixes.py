"""Shared prefixes: KV of another session with which a request may begin, because its tokens agree.

    a resident       its tokens' KV is there
    a running turn   its computed KV is there, until its answer's KV is kept or released. A request
                     most of which such a turn is going to compute waits until it has. So if many
                     requests come with the same prompt at the same time, the first of them
                     computes it. The same holds while the prompt's KV is being copied

The KV is copied; where slots are pages, both sessions hold them.

Waiting costs little: prompts are computed in the order of admission, so that the waiting request
would be computed behind the other one anyway. A request never waits for a turn of lower priority,
nor for one that has to load a history beyond the tokens in question first.

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
    """Finds the best prefix of a request among residents and running turns."""

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
        """Return the longest prefix that is worth sharing; None: there is none.

        A prefix is not worth it if it is shorter than the session's own history, which the store
        likely has, or shorter than a block: part of a block could not be saved again.
        """
        if not self._may_share(request):
            return None
        found = [self._resident_prefix(request), self._running_prefix(request)]
        usable = (prefix for prefix in found if prefix is not None and self._is_whole(*prefix))
        best = max(usable, key=_num_tokens, default=None)
        return best if best is not None and best.num_tokens >= self._min_tokens(request) else None

    def should_wait(self, request: Request) -> bool:
        """Return whether a request should wait for a running turn to compute its prefix."""
        if not self._may_share(request):
            return False
        leader, num_common = self._active.longest_prefix(request) or (None, 0)
        if leader is None:
            return False
        if leader.computed_tokens >= num_common and not self._gate.is_copied(leader):
            return False
        num_tokens = self._aligned(leader, num_common)
        is_worth_it = (
            num_tokens >= self._min_tokens(request)
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

    def _min_tokens(self, request: Request) -> int:
        """Return how many tokens a prefix must have to be worth sharing."""
        block_tokens = max(self._limits.block_tokens, self._limits.page_tokens or 1)
        return max(block_tokens, request.history_tokens, request.computed_tokens)

    def _is_whole(self, source: Resident | Request, num_tokens: int) -> bool:
        return is_whole(num_tokens, source.window_from, self._limits.attention_window)

    def _resident_prefix(self, request: Request) -> SharedPrefix | None:
        found = self._residents.shared_prefix(request)
        if found is None:
            return None
        resident, num_tokens = found
        return SharedPrefix(resident, self._slots.whole_pages(num_tokens))

    def _running_prefix(self, request: Request) -> SharedPrefix | None:
        """Return the computed prefix of a turn that runs, or has just finished."""
        found = self._active.longest_prefix(request, self._is_certain)
        if found is None:
            return None
        leader, num_common = found
        num_tokens = min(num_common, leader.computed_tokens)
        return SharedPrefix(leader, self._aligned(leader, num_tokens))

    def _is_certain(self, leader: Request) -> bool:
        """Return whether a turn's computed KV is good: its load cannot fail any more."""
        return leader.state is RequestState.FINISHED or self._gate.is_certain(leader)

    def _aligned(self, leader: Request, num_tokens: int) -> int:
        """Return the last end of both a whole page and a whole block that is not behind a token.

        Behind a partial block the store finds no block of another session, so what a request
        computes there could not be saved.
        """
        page_tokens, block_tokens = self._slots.account.page_tokens, self._limits.block_tokens
        if leader.whole_until is not None:
            num_tokens = min(num_tokens, leader.whole_until)
        last = self._slots.whole_pages(num_tokens)
        ends = range(last, max(0, last - page_tokens * block_tokens), -page_tokens)
        return next((end for end in ends if (end - leader.boundary) % block_tokens == 0), 0)


def _num_tokens(prefix: SharedPrefix) -> int:
    """Return a prefix's length, for `max`."""
    return prefix.num_tokens
