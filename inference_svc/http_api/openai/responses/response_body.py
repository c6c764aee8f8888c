"""The body of POST /v1/responses.

*Source:* OpenAI API reference, "Responses".
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from inference_svc.core.chat import SYSTEM, Message, Tool
from inference_svc.core.grammar import Grammar
from inference_svc.core.truncation import OLDEST, REJECT
from inference_svc.http_api.bodies.body import Body, Count, Refused, WrongMemberError
from inference_svc.http_api.bodies.conversation import Effort
from inference_svc.http_api.bodies.formats import FlatFormat
from inference_svc.http_api.errors import UnsupportedValueError
from inference_svc.http_api.openai.pages import LOGPROBS, check_included
from inference_svc.http_api.openai.responses.input_items import InputItems, messages_of
from inference_svc.http_api.openai.tools import FUNCTION, NAMESPACE, ResponseTools
from inference_svc.http_api.openai.turn_body import OpenAITurnBody


class TextOptions(Body):
    """`text`: options of the answer's text."""

    refused: ClassVar[Mapping[str, Refused]] = {
        "verbosity": Refused(("medium",), "ask for it in a message"),
    }

    format: FlatFormat | None = None


class ReasoningOptions(Body):
    """`reasoning`: options of the model's thinking."""

    content_words: ClassVar[str] = "effort"
    ignored: ClassVar[frozenset[str]] = frozenset({"context", "generate_summary", "summary"})

    effort: Effort | None = None


class ResponseStreamOptions(Body):
    """`stream_options`: none of them has an effect."""

    ignored: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})


def _check_include(raw: Any) -> Any:
    try:
        check_included(raw if isinstance(raw, list) else ())
    except UnsupportedValueError as error:
        raise WrongMemberError(error.message, error.remedy, kind=type(error)) from error
    return raw


def _to_conversation_id(raw: Any) -> Any:
    """Convert a conversation's id, or the object that has it, to the id; a validator."""
    name = raw.get("id") if isinstance(raw, dict) and len(raw) == 1 else raw
    if not isinstance(name, str) or not name:
        raise WrongMemberError("{path} is not valid", 'send the id of a conversation, or {"id": …}')
    return name


ConversationName = Annotated[str, BeforeValidator(_to_conversation_id)]


class ResponseBody(OpenAITurnBody):
    """The body of POST /v1/responses.

    Attributes:
        instructions: the system message at the beginning of the conversation.
        previous_response_id: id of the response that this one follows; "" if it follows none.
        include: names of additional members to show with the answer.
        truncation: OpenAI's name of the overflow policy; "" for the service's.
        background: whether it is a background response.
        needs_input: whether a request that follows a response needs input of its own.
    """

    needs_input: ClassVar[bool] = True

    refused: ClassVar[Mapping[str, Refused]] = {
        **OpenAITurnBody.refused,
        "background_options": Refused((), "leave it out"),
        "access_programs": Refused((), "leave it out"),
        "image": Refused((), "the service reads text only"),
        "prompt": Refused((), "send instructions and input"),
        "context_management": Refused(
            ([],), "the settings in [overflow] of the service decide what is dropped: leave it out"
        ),
    }
    ignored: ClassVar[frozenset[str]] = OpenAITurnBody.ignored | {"client_metadata"}

    tool_kinds: ClassVar[frozenset[str]] = frozenset({FUNCTION, NAMESPACE})

    background: bool = False
    input: InputItems = Field(default_factory=list)
    tools: ResponseTools = Field(default_factory=list)
    instructions: str = ""
    previous_response_id: str = ""
    conversation_id: ConversationName = Field(default="", alias="conversation")
    max_output_tokens: Count | None = None
    include: Annotated[list[str], BeforeValidator(_check_include)] = Field(default_factory=list)
    truncation: Literal["", "auto", "disabled"] = ""
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions = ReasoningOptions()
    stream_options: ResponseStreamOptions = ResponseStreamOptions()

    @model_validator(mode="after")
    def _check_members(self) -> Self:
        if self.conversation_id and (self.previous_response_id or self.session_id):
            raise WrongMemberError(
                "{path} and a response or session cannot be named together",
                "name one of them: a conversation continues from its own end",
                "conversation",
            )
        follows = self.conversation_id or (self.previous_response_id and not self.needs_input)
        if not self.input and not follows:
            raise WrongMemberError(
                "{path} is missing", "send a string or a list of messages", "input"
            )
        if self.previous_response_id and self.session_id:
            raise WrongMemberError(
                "{path} and a session cannot be named together",
                "name one of them: a response belongs to a session",
                "previous_response_id",
            )
        return self

    @model_validator(mode="after")
    def _check_background(self) -> Self:
        """Check that a background response can be stored with all that it shows."""
        if self.background and not self.store:
            raise WrongMemberError(
                "{path} is only possible with store: true",
                "send store: true, or leave background out",
                "background",
            )
        if self.background and self.shown_logprobs is not None:
            raise WrongMemberError(
                "{path} is not possible with log-probabilities, which are not stored",
                "leave one of them out",
                "background",
                UnsupportedValueError,
            )
        return self

    @property
    def new_messages(self) -> tuple[Message, ...]:
        """The messages of the input."""
        return messages_of(self.input)

    @property
    def conversation(self) -> tuple[Message, ...]:
        """The instructions, as a system message, and the messages of the input."""
        leading = (Message(SYSTEM, self.instructions),) if self.instructions else ()
        return (*leading, *self.new_messages)

    @property
    def effort(self) -> Effort | None:
        """The reasoning effort; None if the client gives none."""
        return self.reasoning.effort

    @property
    def offered(self) -> tuple[Tool, ...]:
        """The tools that the client offers."""
        return tuple(tool for each in self.tools for tool in each.offered())

    @property
    def max_answer_tokens(self) -> int | None:
        """Most tokens of the answer; None if the client gives no bound."""
        return self.max_output_tokens

    @property
    def shown_logprobs(self) -> int | None:
        """Number of alternatives shown of each token; None: no log-probabilities."""
        is_asked = LOGPROBS in self.include or self.top_logprobs is not None
        return (self.top_logprobs or 0) if is_asked else None

    @property
    def grammar(self) -> Grammar | None:
        """The grammar that the answer has to follow; None for free text."""
        return super().grammar if self.text.format is None else self.text.format.grammar

    def overflow(self, default: str) -> str:
        """Return the overflow policy's name for OpenAI's `truncation`; "" for the default one."""
        if self.truncation == "disabled":
            return REJECT
        return OLDEST if self.truncation == "auto" and default == REJECT else ""
