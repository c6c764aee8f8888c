"""Bodies of requests as pydantic models: the base of all, and what each request for a turn has.

Types are strict: true is not 1, 3.0 is no whole number, a number in quotes is text. A member that
is null counts as absent, as it does for OpenAI. Members are refused in one of three ways: a feature
that is not there (`unsupported_value`), a value off its type or bounds (`invalid_value`), a name
that nobody knows (`unknown_parameter`); the first of these in a body is reported, with its path.

Sampling is OpenAI's and Anthropic's, with the service's own parameters beside it (`min_p`,
`repetition_penalty`, `ignore_eos`). A request that names no temperature gets the one of the
settings, which is their default there.
"""

import difflib
import functools
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from inference_svc.core.answers import MAX_STOP_STRINGS
from inference_svc.core.chat import ToolUse
from inference_svc.core.grammar import Grammar
from inference_svc.core.retention import NO_RETENTION, Retention
from inference_svc.http_api.errors import RequestError, UnknownParameterError, UnsupportedValueError

MAX_SHOWN = 60  # characters of a bad value that a message repeats
MOST_TOKENS = 2**31 - 1
MAX_SEED = 2**63  # negative seeds are taken modulo it
MAX_METADATA = 16  # OpenAI's bounds
MAX_METADATA_NAME = 64
MAX_METADATA_TEXT = 512

# What clients of other servers send (llama.cpp, vLLM, Ollama, SGLang, OpenRouter), of caches, slots
# and reports that are not here; it changes no answer.
FOREIGN = frozenset(
    {
        *("add_special_tokens", "cache_prompt", "id_slot", "keep_alive", "n_cache_reuse", "n_keep"),
        *("provider", "return_progress", "return_tokens", "rid", "slot_id", "timings_per_token"),
        *("spaces_between_special_tokens", "transforms", "usage"),
    }
)

B = TypeVar("B", bound="Body")


@dataclass(frozen=True)
class Refused:
    """A member that means something that the service does not do.

    Attributes:
        accepted: values that have no effect.
        remedy: what to do instead.
    """

    accepted: tuple[object, ...]
    remedy: str

    def allows(self, value: object) -> bool:
        """Whether a value has no effect; true and 1 are different."""
        return any(
            isinstance(value, bool) == isinstance(each, bool) and value == each
            for each in self.accepted
        )


class WrongMemberError(ValueError):
    """A validator of ours refuses a value; `decode` raises a `kind` of it, with its path.

    Args:
        message: "{path}" stands for the path, "{path!r}" for the same in quotes.
        remedy: what to send instead.
        name: of the member in the value that is validated; "" for that value itself.
        kind: the error that the client gets.
    """

    def __init__(
        self, message: str, remedy: str, name: str = "", kind: type[RequestError] = RequestError
    ) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.name = name
        self.kind = kind


class Body(BaseModel):
    """An object that a client sent.

    Attributes:
        content_words: what an object of this kind is made of, for people.
        refused: members that ask for what there is not.
        ignored: members that change nothing that this service does.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")

    content_words: ClassVar[str] = "an object"
    refused: ClassVar[Mapping[str, Refused]] = {}
    ignored: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _take_what_counts(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            raise WrongMemberError("{path} is not an object", f"send {cls.content_words}")
        for name, rule in cls.refused.items():
            value = given.get(name)
            if value is not None and not rule.allows(value):
                message = f"{{path}} = {_shown(value)} is not supported"
                raise WrongMemberError(message, rule.remedy, name, UnsupportedValueError)
        taken, known, missed = _names(cls)
        values = dict(missed)
        values |= {name: given[name] for name in taken if given.get(name) is not None}
        for name, value in given.items():
            if value is not None and name not in known:
                values[name] = value  # one is enough to refuse them all
                break
        return values

    @model_validator(mode="after")
    def _know_all(self) -> Self:
        for name in self.model_extra or ():
            shown = name[:MAX_SHOWN]  # the name may be as long as the body
            close = difflib.get_close_matches(shown, sorted(_names(type(self))[1]), n=1)
            raise WrongMemberError(
                "there is no parameter {path!r}",
                f"did you mean {close[0]!r}?" if close else "leave it out",
                shown,
                UnknownParameterError,
            )
        return self


@functools.cache
def _names(kind: type[Body]) -> tuple[tuple[str, ...], frozenset[str], dict[str, Any]]:
    """Return the names of an object's members that are read, of all that it may have, and defaults.

    The defaults are of those that may be missed: what pydantic fills in itself it calls by the name
    of its field, which no client knows.
    """
    fields = kind.model_fields
    taken = tuple(field.alias or name for name, field in fields.items())
    missed = {f.alias: f.default for f in fields.values() if f.alias and f.validate_default}
    return taken, frozenset((*taken, *kind.refused, *kind.ignored)), missed


def decode(kind: type[B], given: dict[str, Any]) -> B:
    """Read an object that a client sent.

    Raises:
        RequestError: something is off, unknown or not supported.
    """
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        refusals = [_refusal(found) for found in error.errors(include_url=False)]
        raise min(refusals, key=_rank) from error


def _rank(refusal: RequestError) -> int:
    """Order refusals: first what is not there, then what is off, last a name that nobody knows."""
    if isinstance(refusal, UnsupportedValueError):
        return 0
    return 2 if isinstance(refusal, UnknownParameterError) else 1


# What to send instead, by pydantic's names of what is off.
_EXPECTED: Mapping[str, str] = {
    "string_type": "a string",
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "list_type": "a list",
    "dict_type": "an object",
    "literal_error": "{expected}",
    "greater_than_equal": "a number, {ge} or more",
    "less_than_equal": "a number, {le} or less",
    "too_short": "a list of {min_length} or more",
    "too_long": "a list of {max_length} or less",
}


def _refusal(found: Any) -> RequestError:
    """Turn one of pydantic's errors into one that OpenAI's clients know."""
    context = found.get("ctx", {})
    wrong = context.get("error")
    if isinstance(wrong, WrongMemberError):
        path = _path(*found["loc"], wrong.name)
        message = wrong.message.replace("{path!r}", repr(path), 1).replace("{path}", path, 1)
        return wrong.kind(message, wrong.remedy, path)
    path = _path(*found["loc"])
    bounds = {name: f"{b:g}" if isinstance(b, float) else b for name, b in context.items()}
    expected = _EXPECTED.get(found["type"], "another value").format(**bounds)
    return RequestError(f"{path} = {_shown(found['input'])} cannot be", f"send {expected}", path)


def _path(*parts: str | int) -> str:
    """Write where a member is in the body, as in "messages[2].content"."""
    path = ""
    for part in parts:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part and not part.startswith("<"):  # the kind of an item, which is no member
            path += part if not path or part.startswith("[") else f".{part}"
    return path


def _shown(value: object) -> str:
    if isinstance(value, list | dict):
        return "[…]" if isinstance(value, list) else "{…}"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 64:
        return "a very large number"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…"


# ---------------------------------------------------------------------------- requests for turns


def _stop(given: Any) -> Any:
    if isinstance(given, str):
        return [given] if given else []
    is_list = isinstance(given, list) and len(given) <= MAX_STOP_STRINGS
    if not is_list or not all(isinstance(text, str) for text in given):
        raise WrongMemberError(
            "{path} cannot be so", f"send a string, or at most {MAX_STOP_STRINGS} strings"
        )
    return given


def _metadata(given: Any) -> Any:
    """Bound a client's notes before they are read; null is an empty text."""
    if not isinstance(given, dict):
        return given
    if len(given) > MAX_METADATA or any(
        len(name) > MAX_METADATA_NAME or (isinstance(text, str) and len(text) > MAX_METADATA_TEXT)
        for name, text in given.items()
    ):
        raise WrongMemberError(
            "{path} is too long",
            f"send at most {MAX_METADATA} texts of {MAX_METADATA_TEXT} characters, under names "
            f"of {MAX_METADATA_NAME}",
        )
    return {name: "" if text is None else text for name, text in given.items()}


def named(name: str) -> str:
    """Validate that a model is named."""
    if not name:
        raise WrongMemberError("{path} is missing", "name one of GET /v1/models")
    return name


Count = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
TokenId = Annotated[int, Field(ge=0, le=MOST_TOKENS)]
Metadata = Annotated[dict[str, str], BeforeValidator(_metadata)]
StopStrings = Annotated[list[str], BeforeValidator(_stop)]


class ModelBody(Body):
    """A request to a model.

    Attributes:
        model: name of the model; "" for the one that is served.
    """

    model: str = ""


class TurnBody(ModelBody, ABC):
    """A request for a turn, of whichever API.

    Attributes:
        model: name of the model that is to answer; OpenAI demands it, too.
        store: whether the session may stay afterwards.
        session_id: the session that the client names; "" if its messages decide.
        metadata: a client's own notes.
        tool_kinds: types of tools that clients run.
        call_prefix: what ids of calls begin with.
    """

    tool_kinds: ClassVar[frozenset[str]] = frozenset()
    call_prefix: ClassVar[str] = "call_"

    model: Annotated[str, AfterValidator(named)] = Field(default="", validate_default=True)
    stream: bool = False
    store: bool = True
    session_id: str = ""
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=0, le=MOST_TOKENS)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, ge=0, le=100)
    seed: int | None = Field(default=None, ge=-MAX_SEED, le=MAX_SEED - 1)
    stop: StopStrings = Field(default_factory=list)
    ignore_eos: bool = False
    metadata: Metadata = Field(default_factory=dict)

    @property
    @abstractmethod
    def max_answer_tokens(self) -> int | None:
        """Bound of the answer; None if the client does not say."""

    @property
    def shown_logprobs(self) -> int | None:
        """How many alternatives are shown of each token; None: not even its own probability."""
        return None

    @property
    def grammar(self) -> Grammar | None:
        """What the answer has to be; None: whatever the model says."""
        return None

    @classmethod
    def without_foreign(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Return a body without the tools that a vendor would run: the model is not told of them.

        Args:
            given: the body, as it came.
        """
        tools = given.get("tools")
        if not isinstance(tools, list):
            return given
        return {**given, "tools": [tool for tool in tools if not cls._is_foreign(tool)]}

    @classmethod
    def _is_foreign(cls, tool: Any) -> bool:
        kind = tool.get("type") if isinstance(tool, dict) else None
        return isinstance(kind, str) and kind not in cls.tool_kinds

    @property
    def cache_key(self) -> str:
        """The client's name of the conversation, see `agents.py`; "" if it says none."""
        return ""

    @property
    def retention(self) -> Retention:
        """For how long the client wants what is computed to be kept at least."""
        return NO_RETENTION

    @property
    def predicted(self) -> str:
        """What most of the answer will likely be; "" if the client does not say."""
        return ""

    @property
    def tool_use(self) -> ToolUse:
        """What the answer may do with tools."""
        return ToolUse()

    @property
    def template_arguments(self) -> dict[str, Any]:
        """Arguments of the chat template, as the client gives them."""
        return {}

    @property
    def beginning(self) -> str:
        """What the answer begins with, in the client's words; "": nothing."""
        return ""

    @property
    def own_sampling(self) -> dict[str, Any]:
        """Sampling values that only this API's requests have; None: the client does not say."""
        return {}

    def sampling(self, temperature: float, choice: int = 0) -> dict[str, Any]:
        """Return the client's sampling values, by the names of `SamplingParams`.

        Args:
            temperature: temperature of a request that names none.
            choice: index of the answer among those of the request, which have seeds of their own.
        """
        said = {
            "temperature": temperature if self.temperature is None else self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "seed": None if self.seed is None else (self.seed + choice) % MAX_SEED,
            "max_tokens": self.max_answer_tokens,
            # The engine reports a token's own log-probability with its most likely ones only.
            "logprobs": None if self.shown_logprobs is None else max(1, self.shown_logprobs),
            "stop": tuple(self.stop),
            "ignore_eos": self.ignore_eos,
            "grammar": self.grammar,
            **self.own_sampling,
        }
        return {name: value for name, value in said.items() if value is not None}
