"""A client's request for one turn of one session, the same from gRPC and HTTP. Pure."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from inference_svc.core.answers import SamplingParams
from inference_svc.core.chat import ASSISTANT, Message, Tool, canonical
from inference_svc.core.compression import CompressionPolicy
from inference_svc.core.errors import InvalidTurnError
from inference_svc.core.misses import Resembled
from inference_svc.core.retention import NO_RETENTION, Retention
from inference_svc.core.template_arguments import Arguments, canonical_arguments
from inference_svc.core.tools.bound_calls import BoundCalls
from inference_svc.core.truncation import USUAL_SINKS, OverflowPolicy
from inference_svc.core.turn_record import ConversationDigests
from shared.types.session_key import SessionKey


@dataclass(frozen=True)
class TextInput:
    """Raw text, without a template.

    Attributes:
        text: the text.
        has_special: whether names of special tokens in the text are these tokens; else plain text.
    """

    text: str
    has_special: bool = False

    @property
    def whole_texts(self) -> Iterator[str]:
        """The texts of which the model reads all."""
        yield self.text


@dataclass(frozen=True)
class ChatInput:
    """New messages of this turn.

    Attributes:
        messages: the new messages.
        tools: the tools that the model may call; the same in all turns of a session that have any.
        arguments: arguments of the chat template, as the client sent them.
        beginning: the text that the answer has to begin with, set by the client; "": none.
        is_prompt: whether an answer is to follow; else the messages are only rendered.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    arguments: Arguments = field(default_factory=dict)
    beginning: str = ""
    is_prompt: bool = True

    def as_messages(self) -> list[dict[str, Any]]:
        """Return the messages in the form that chat templates expect."""
        return [message.as_template() for message in self.messages]

    def as_tools(self) -> list[dict[str, Any]]:
        """Return the tools in the form that chat templates expect."""
        return [tool.as_template() for tool in self.tools]

    @property
    def whole_texts(self) -> Iterator[str]:
        """The texts of which the model reads all: templates may cut thoughts out of answers."""
        return (message.content for message in self.messages if message.role != ASSISTANT)

    @property
    def tools_digest(self) -> str:
        """A digest of the tools; "" if there are none."""
        written = canonical(self.tools)
        return hashlib.blake2b(written.encode(), digest_size=16).hexdigest() if written else ""

    @property
    def num_characters(self) -> int:
        """Number of characters of messages, calls, tools and arguments together."""
        messages = sum(len(message.content) for message in self.messages)
        calls = sum(len(c.arguments) for message in self.messages for c in message.tool_calls)
        others = len(canonical(self.tools)) + len(canonical_arguments(self.arguments))
        return messages + calls + others + len(self.beginning)


@dataclass(frozen=True)
class TokenInput:
    """Token ids, appended as they are."""

    token_ids: tuple[int, ...]


MAX_NAME = 128  # characters of the name of a message's author
MAX_REQUEST_ID = 256  # characters: transcripts, events and log lines repeat it
MIN_PRIORITY, MAX_PRIORITY = -100, 100
CHARACTERS_PER_TOKEN = 4  # of most languages and tokenizers, about
MAX_DEADLINE_S = 365 * 86400.0  # a later deadline counts as none

TurnInput: TypeAlias = TextInput | ChatInput | TokenInput


@dataclass(frozen=True)
class ModelTraits:
    """Properties of the model, which decide where the settings are "auto".

    Attributes:
        attention_mode: mode of its calibration; not every compression policy works in every mode.
        sink_tokens: number of first tokens that are its attention sinks.
        keeps_truncated: whether KV of a truncated context stays valid (positions are decoupled);
            else it is computed again.
    """

    attention_mode: str = ""
    sink_tokens: int = USUAL_SINKS
    keeps_truncated: bool = False


@dataclass(frozen=True)
class TurnDefaults:
    """Values for turns that do not set their own, and the model's properties.

    Attributes:
        max_tokens: most tokens of an answer.
        overflow: the overflow policy.
        compression: a compression policy's name.
        keep_ratio: share of the context that compression keeps, in (0, 1].
        model: the model's properties.
    """

    max_tokens: int
    overflow: OverflowPolicy = field(default_factory=OverflowPolicy)
    compression: str = "none"
    keep_ratio: float = 0.5
    model: ModelTraits = ModelTraits()


class TurnNames(NamedTuple):
    """A client's names for a turn, not validated; "" if a name is not given."""

    tenant: str
    session_id: str
    request_id: str


@dataclass(frozen=True)
class Submission:
    """A request for a turn, in the form that the gateway takes from gRPC and HTTP alike.

    Attributes:
        key: the session's key.
        input: the turn's input, never empty.
        sampling: how its answer is sampled.
        has_max_tokens: whether the client bounded the answer. If not, and nothing may be dropped,
            the answer may fill the rest of the window, up to sampling.max_tokens.
        request_id: the client's id of the turn: a repeat has the same.
        digest: digest of input and sampling as the client sent them; "" if no other turn can have
            the same request id, because that is a digest of them.
        expected_turn: number of complete turns that the client expects; None: any.
        waits: whether it queues behind a running turn of the session.
        is_final: whether the session ends with this turn.
        arrived_ns: arrival on the monotonic clock.
        priority: MIN_PRIORITY to MAX_PRIORITY; higher priorities are served first.
        deadline_ns: time on the monotonic clock by which it is answered or fails; None: never.
        overflow: the policy by which tokens are dropped when the window is full.
        compression: the policy by which tokens are dropped when the turn is over; None: none.
        retention: for how long its KV is to be kept at least.
        client: name of the identity that submits it.
        shown_marks: special tokens that the answer's text contains, as text, so that it can be
            parsed.
        calls: the calls that a grammar binds its answer to, once it has begun one; None: it is
            bound to none, or to a single grammar (`sampling`).
        prediction: text that most of its answer will likely repeat; "" if the client sent none.
        resembles: the session that it was likely meant to continue, but does not; None: none.
        is_local: whether a session that it opens is only on this server: no other would find it.
        fork_id: the fork of its session that it is recorded in if another server has continued that
            session meanwhile; "": then it is refused, because its client has named the session.
        make_digests: returns, for the answer's text and the id of the session that has it, the
            digests of the whole conversation that its record has; None: they are not known.
        response_id: id of the response that it is to be stored as; "": it is not stored.
    """

    key: SessionKey
    input: TurnInput
    sampling: SamplingParams
    has_max_tokens: bool
    request_id: str
    digest: str
    expected_turn: int | None
    waits: bool
    is_final: bool
    arrived_ns: int
    priority: int = 0
    deadline_ns: int | None = None
    overflow: OverflowPolicy = field(default_factory=OverflowPolicy)
    compression: CompressionPolicy | None = None
    retention: Retention = NO_RETENTION
    client: str = ""
    shown_marks: frozenset[str] = frozenset()
    calls: BoundCalls | None = None
    prediction: str = ""
    resembles: Resembled | None = None
    is_local: bool = False
    fork_id: str = ""
    make_digests: Callable[[str, str], ConversationDigests] | None = None
    response_id: str = ""

    def digests_in(self, session_id: str, text: str) -> ConversationDigests:
        """Return the digests that an answer's record has, in the session that has the answer."""
        return self.make_digests(text, session_id) if self.make_digests else ConversationDigests()

    @property
    def tools_digest(self) -> str:
        """A digest of the tools that it offers; "" if it offers none."""
        return self.input.tools_digest if isinstance(self.input, ChatInput) else ""

    @property
    def most_tokens(self) -> int:
        """Estimate of its tokens: those of its input and of the longest answer."""
        if isinstance(self.input, TokenInput):
            num_input = len(self.input.token_ids)
        elif isinstance(self.input, TextInput):
            num_input = len(self.input.text) // CHARACTERS_PER_TOKEN
        else:
            num_input = self.input.num_characters // CHARACTERS_PER_TOKEN
        return num_input + self.sampling.max_tokens


def check_author_name(name: str) -> None:
    """Check the name of a message's author; "" is valid.

    Raises:
        InvalidTurnError: it is too long, or has more than one line.
    """
    if len(name) > MAX_NAME or not name.isprintable():
        raise InvalidTurnError(
            f"{name[:40]!r} is not a valid name of a message's author",
            f"send up to {MAX_NAME} characters on one line",
        )
