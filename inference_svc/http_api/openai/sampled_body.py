"""How answers to OpenAI's requests are sampled."""

import re
from abc import ABC
from typing import Annotated, Any

from pydantic import BeforeValidator, FailFast, Field

from inference_svc.core.answers import MAX_BIAS, MAX_BIASED_TOKENS, MAX_PENALTY
from inference_svc.core.grammar import Grammar
from inference_svc.http_api.bodies.body import MOST_TOKENS, TokenId, TurnBody, WrongMemberError
from inference_svc.http_api.bodies.formats import StructuredOutputs

_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")


def _by_token(given: Any) -> Any:
    """Read the names of a bias as token ids: in JSON they are texts."""
    if not isinstance(given, dict):
        return given
    if len(given) > MAX_BIASED_TOKENS or not all(map(_TOKEN_ID.fullmatch, given)):
        raise WrongMemberError(
            "{path} cannot be so",
            f'send ids of at most {MAX_BIASED_TOKENS} tokens, as in {{"50256": -100}}',
        )
    return {int(name): bias for name, bias in given.items()}


Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]
Penalty = Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)]


class SampledBody(TurnBody, ABC):
    """How answers are sampled, beyond what every API has.

    OpenAI's responses have no penalties and no bias; here they do.

    Attributes:
        min_tokens, stop_token_ids, structured_outputs: not OpenAI's, but vLLM's, which its clients
            send, too.
    """

    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: Annotated[dict[int, Bias], BeforeValidator(_by_token)] = Field(default_factory=dict)
    min_tokens: int | None = Field(default=None, ge=0, le=MOST_TOKENS)
    stop_token_ids: Annotated[list[TokenId], FailFast()] = Field(default_factory=list)
    structured_outputs: StructuredOutputs | None = None

    @property
    def grammar(self) -> Grammar | None:
        """What the answer has to be; None: whatever the model says."""
        return None if self.structured_outputs is None else self.structured_outputs.grammar

    @property
    def own_sampling(self) -> dict[str, Any]:
        """Sampling values that only OpenAI's requests have; see `TurnBody`."""
        return {
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "logit_bias": self.logit_bias or None,
            "min_tokens": self.min_tokens,
            "stop_token_ids": tuple(self.stop_token_ids) or None,
        }
