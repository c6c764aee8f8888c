"""What a client asks for: one turn of one session. Pure."""

from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from inference_svc.core.answers import SamplingParams
from inference_svc.core.compression.policy import CompressionPolicy
from inference_svc.core.truncation import USUAL_SINKS, OverflowPolicy
from shared.types.session_key import SessionKey


@dataclass(frozen=True)
class TextInput:
    """Raw text, no template.

    Attributes:
        has_special: names of special tokens in it are these tokens; otherwise they are text.
    """

    text: str
    has_special: bool = False


@dataclass(frozen=True)
class ChatInput:
    """New messages of this turn: (role, content)."""

    messages: tuple[tuple[str, str], ...]

    def as_messages(self) -> list[dict[str, str]]:
        """As chat templates take them."""
        return [{"role": role, "content": content} for role, content in self.messages]


@dataclass(frozen=True)
class TokenInput:
    """Token ids, appended as they are."""

    token_ids: tuple[int, ...]


MIN_PRIORITY, MAX_PRIORITY = -100, 100
CHARACTERS_PER_TOKEN = 4  # of most languages and tokenizers, about
MAX_DEADLINE_S = 365 * 86400.0  # later ones than in a year are none

TurnInput: TypeAlias = TextInput | ChatInput | TokenInput


@dataclass(frozen=True)
class ModelTraits:
    """What the model says about its turns where the settings leave it to the model.

    Attributes:
        attention_mode: of its calibration; not every compression policy goes with every mode.
        sink_tokens: first tokens that it leans on.
        keeps_truncated: what is left of a truncated context stays valid (positions are decoupled);
            else it is computed again.
    """

    attention_mode: str = ""
    sink_tokens: int = USUAL_SINKS
    keeps_truncated: bool = False


@dataclass(frozen=True)
class TurnDefaults:
    """What a turn gets that does not say, and what the model allows.

    Attributes:
        max_tokens: of an answer.
        compression: a policy's name.
    """

    max_tokens: int
    overflow: OverflowPolicy = field(default_factory=OverflowPolicy)
    compression: str = "none"
    keep_ratio: float = 0.5
    model: ModelTraits = ModelTraits()


class TurnNames(NamedTuple):
    """What a client calls a turn, as it came: nothing of it has been checked; "" is not given."""

    tenant: str
    session_id: str
    request_id: str


@dataclass(frozen=True)
class Submission:
    """What every front makes of a client's request for a turn, gRPC and HTTP alike.

    Attributes:
        input: never empty.
        has_max_tokens: False: where nothing may be dropped, the answer may fill what is left of the
            window, up to sampling.max_tokens.
        digest: of input and sampling as the client sent them; "" if no other turn can have the same
            request id, because that is a digest of them.
        expected_turn: turns the client believes are complete, None if it does not say.
        waits: queue behind a running turn of the session.
        is_final: the conversation ends with this turn.
        arrived_ns: monotonic clock.
        priority: MIN_PRIORITY to MAX_PRIORITY; higher ones are served first.
        deadline_ns: monotonic clock; the turn fails if it is not answered by then. None: no hurry.
        overflow: what goes when the window is full.
        compression: what goes when the turn is over; None: nothing.
        client: who submits it, by the name of its identity.
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
    client: str = ""

    @property
    def most_tokens(self) -> int:
        """About how many tokens it may cost: those of its input and of the longest answer."""
        if isinstance(self.input, TokenInput):
            num_input = len(self.input.token_ids)
        elif isinstance(self.input, TextInput):
            num_input = len(self.input.text) // CHARACTERS_PER_TOKEN
        else:
            num_characters = sum(len(content) for _, content in self.input.messages)
            num_input = num_characters // CHARACTERS_PER_TOKEN
        return num_input + self.sampling.max_tokens
