"""Drafts: tokens guessed to come next in each running answer, where verifying them pays.

No answer depends on drafts: `stepping.py` samples the tokens that it would sample without them.
Speculation turns itself off where it does not pay: an answer without a draft, or whose drafts are
rarely right, is computed a token a step, and so are all answers where computing more tokens takes
too long. What drafts would have gained is counted nevertheless.
"""

from collections.abc import Iterable

from inference_svc.core.rates.rates import DecodeTimes
from inference_svc.core.scheduling.request import RequestState
from inference_svc.core.scheduling.step_plan import NO_DRAFTS, Drafts
from inference_svc.core.speculation.draft_lengths import Acceptance, StepCost, draft_lengths
from inference_svc.core.speculation.prompt_lookup import PromptLookup
from inference_svc.runtime.engine.engine_request import EngineRequest

# After this many steps in a row whose drafts were all refused, one step verifies a token of each:
# otherwise the time of a step with drafts would never be measured again.
TRY_EVERY = 64


class Drafter:
    """Drafts the next tokens of running answers from their own contexts.

    Args:
        decodes: the measured times of decode steps.
        end_ids: tokens that end answers: a draft ends before the first of them.

    Attributes:
        most_tokens: most tokens of an answer's draft; 0: there are no drafts.
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
        """Return drafts of running answers, by request number.

        Costs some microseconds an answer; an answer that begins costs 0.1 ms for each thousand
        tokens of its context, from which its lookup is made. Requests whose attention is scored
        have no drafts: wrong tokens would be scored, too.
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
            lengths = [int(bool(chance)) for chance in chances]
        drafted = zip(answering, lookups, lengths, strict=True)
        return {
            request.number: self._cut_at_end(lookup.draft(length))
            for request, lookup, length in drafted
            if length
        }

    def _lookup(self, request: EngineRequest) -> PromptLookup:
        """Return a request's lookup, brought up to its last token."""
        if request.lookup is None:
            request.lookup = PromptLookup(
                request.token_ids[: request.prompt_tokens],
                Acceptance(self._acceptance),
                request.predicted_ids,
            )
        request.lookup.advance(request.token_ids)
        return request.lookup

    def _cut_at_end(self, draft: list[int]) -> list[int]:
        """Return a draft up to its first token that ends answers."""
        ends = (place for place, token_id in enumerate(draft) if token_id in self._end_ids)
        return draft[: next(ends, len(draft))]


def _is_answering(request: EngineRequest) -> bool:
    is_running = request.state is RequestState.RUNNING and request.is_decoding
    return is_running and request.scores is None
