"""What a request says to the chat template, beside messages and tools: the same in every API."""

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import AfterValidator

from inference_svc.core.chat import ASSISTANT, Message, check_sayer
from inference_svc.core.errors import InvalidTurnError
from inference_svc.core.template_arguments import check_arguments
from inference_svc.http_api.bodies.body import WrongMemberError
from inference_svc.http_api.errors import UnsupportedValueError

T = TypeVar("T")


def _checked(check: Callable[[T], None]) -> AfterValidator:
    """Make a validator of a check that every way in has."""

    def validate(given: T) -> T:
        try:
            check(given)
        except InvalidTurnError as error:
            raise WrongMemberError(error.message, error.remedy) from error
        return given

    return AfterValidator(validate)


TemplateArguments = Annotated[dict[str, Any], _checked(check_arguments)]
SayerName = Annotated[str, _checked(check_sayer)]
# How much the model is to think, in OpenAI's words; which of them a template knows is its business.
Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def check_begun(message: Message, path: str) -> None:
    """Check that a message can be gone on with as the answer; for a validator of its body.

    Args:
        message: the last one.
        path: where it is said.

    Raises:
        WrongMemberError: it is no answer, or one that calls.
    """
    if message.role != ASSISTANT:
        raise WrongMemberError(
            f"the last message is the {message.role}'s, which is no answer to go on with",
            f"end with a message of the {ASSISTANT}'s",
            path,
        )
    if message.tool_calls:
        raise WrongMemberError(
            "an answer that calls tools cannot be gone on with",
            "end with what they returned, or leave the calls out",
            path,
            UnsupportedValueError,
        )
