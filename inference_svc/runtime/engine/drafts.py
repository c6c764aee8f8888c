"""Which tokens to try behind the next one of each answer under way, where that pays.

Nothing that is answered depends on it: `stepping.py` samples what it would sample without drafts.
Speculation is off by itself where it is of no use: an answer without a draft, or with one that is
rarely right, is computed a token a step, and so are all where computing more takes too long. What
drafts would have been worth is counted all the same.
"""

from collections.abc import Iterable

from inference_svc.core.rates.rates import DecodeTimes
from inference_svc.core.scheduling.request import RequestState
from inference_svc.core.scheduling.step_plan import NO_DRAFTS, Drafts
from inference_svc.core.speculation.draft_lengths import Acceptance, StepCost, draft_lengths
from inference_svc.core.speculation.prompt_lookup import PromptLookup
from inference_svc.runtime.engine.engine_request import EngineRequest

# So many steps without any of the drafts that there were, and one has a token of each all the same:
# what steps take would not be measured again otherwise.
TRY_EVERY = 64


class Drafter:
    """See the module docstring.

    Args:
        decodes: what steps take, as measured.
        end_ids: tokens that end answers: nothing is drafted from there on.

    Attributes:
        most_tokens: of an answer's draft; 0: there are none.
    """

    def __init__(
        self, decodes: DecodeTimes, *, most_tokens: int, end_ids: frozenset[int] = frozenset()
    ) -> None:
        self._decodes = decodes
        self.most_tokens = most_tokens
        self._end_ids = end_ids
        self._acceptance = Acceptance()
        self._num_refused = 0  # steps in a row

    def drafts(self, requests: Iterable[EngineRequest]) -> Drafts:
        """Draft what running answers may go on with, by request number.

        Takes some microseconds an answer; one that begins is given its lookup: 0.1 ms for each
        thousand tokens of its context. Those whose attention is scored have no drafts: wrong tokens
        would be scored, too.
        """
        if not self.most_tokens:
            return NO_DRAFTS
        answering = [request for request in requests if _is_answering(request)]
        lookups = [self._lookup(request) for request in answering]
        chances = [lookup.chances(self.most_tokens) for lookup in lookups]
        if not any(chances):
            return NO_DRAFTS
        lengths = draft_lengths(chances, self._decodes.cost(len(answering)) or StepCost())
        self._num_refused = 0 if any(lengths) else self._num_refused + 1
        if self._num_refused == TRY_EVERY:
            self._num_refused = 0
            lengths = [int(bool(its)) for its in chances]
        drafted = zip(answering, lookups, lengths, strict=True)
        return {
            request.number: self._up_to_end(lookup.draft(length))
            for request, lookup, length in drafted
            if length
        }

    def _lookup(self, request: EngineRequest) -> PromptLookup:
        """Return a request's lookup, which has seen all of its tokens."""
        if request.lookup is None:
            request.lookup = PromptLookup(
                request.token_ids[: request.prompt_tokens],
                Acceptance(self._acceptance),
                request.predicted_ids,
            )
        request.lookup.advance(request.token_ids)
        return request.lookup

    def _up_to_end(self, draft: list[int]) -> list[int]:
        ends = (place for place, token_id in enumerate(draft) if token_id in self._end_ids)
        return draft[: next(ends, len(draft))]


def _is_answering(request: EngineRequest) -> bool:
    is_running = request.state is RequestState.RUNNING and request.is_decoding
    return is_running and request.scores is None
