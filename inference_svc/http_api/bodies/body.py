"""Bodies of requests as pydantic models: their base class, and the base of bodies for turns.

Types are strict: true is not 1, 3.0 is not an integer, a number in quotes is text. A member that
is null counts as absent, as it does for OpenAI. There are three kinds of refusal, and a body's
first refusal in this order is reported, with its path: a feature that the service lacks
(`unsupported_value`), a value of another type or out of bounds (`invalid_value`), an unknown name
(`unknown_parameter`).

Sampling parameters are OpenAI's and Anthropic's, and some that they lack (`min_p`,
`repetition_penalty`, `ignore_eos`). The settings have the default temperature (the vendors').
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

MAX_SHOWN = 60  # characters of an invalid value that a message repeats
MOST_TOKENS = 2**31 - 1
MAX_SEED = 2**63  # negative seeds are taken modulo it
MAX_METADATA = 16  # notes; this and the next two are OpenAI's bounds
MAX_METADATA_NAME = 64  # characters
MAX_METADATA_TEXT = 512  # characters

# Parameters of other servers (llama.cpp, vLLM, Ollama, SGLang, OpenRouter) about their caches,
# slots and reports. They change no answer, so the settings may let them pass.
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
    """The rule of a member whose feature the service lacks.

    Attributes:
        accepted: values that ask for nothing, and are accepted.
        remedy: what to do instead of sending another value.
    """

    accepted: tuple[object, ...]
    remedy: str

    def allows(self, value: object) -> bool:
        """Return whether a value is accepted; true and 1 are different."""
        return any(
            isinstance(value, bool) == isinstance(each, bool) and value == each
            for each in self.accepted
        )


class WrongMemberError(ValueError):
    """A validator refuses a value; `decode` converts it to an error of class `kind`.

    Args:
        message: the message, in which "{path}" is replaced by the value's path, and "{path!r}" by
            the path in quotes.
        remedy: what to send instead.
        name: name of the refused member of the validated value; "" for the value itself.
        kind: class of the error that the client gets.
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
    """A JSON object of a request's body.

    Attributes:
        content_words: the members of such an object, for error messages.
        refused: members whose feature the service lacks.
        ignored: members that have no effect in this service.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")

    content_words: ClassVar[str] = "an object"
    refused: ClassVar[Mapping[str, Refused]] = {}
    ignored: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _select_members(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            raise WrongMemberError("{path} is not an object", f"send {cls.content_words}")
        for name, rule in cls.refused.items():
            value = raw.get(name)
            if value is not None and not rule.allows(value):
                message = f"{{path}} = {_shown(value)} is not supported"
                raise WrongMemberError(message, rule.remedy, name, UnsupportedValueError)
        taken, known, missed = _names(cls)
        values = dict(missed)
        values |= {name: raw[name] for name in taken if raw.get(name) is not None}
        for name, value in raw.items():
            if value is not None and name not in known:
                values[name] = value  # one unknown member is enough to refuse the object
                break
        return values

    @model_validator(mode="after")
    def _check_no_unknown(self) -> Self:
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
    """Return the names of an object's fields, of all members that it may have, and some defaults.

    The defaults are those that are validated, for fields with an alias: if pydantic filled them
    in, its errors would name the field, and not the alias that clients know.
    """
    fields = kind.model_fields
    taken = tuple(field.alias or name for name, field in fields.items())
    missed = {f.alias: f.default for f in fields.values() if f.alias and f.validate_default}
    return taken, frozenset((*taken, *kind.refused, *kind.ignored)), missed


def decode(kind: type[B], raw: dict[str, Any]) -> B:
    """Validate an object that a client sent.

    Raises:
        RequestError: a member is unsupported, invalid or unknown.
    """
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        refusals = [_refusal(found) for found in error.errors(include_url=False)]
        raise min(refusals, key=_rank) from error


def _rank(refusal: RequestError) -> int:
    """Return the order of refusals: unsupported values, then invalid ones, then unknown names."""
    if isinstance(refusal, UnsupportedValueError):
        return 0
    return 2 if isinstance(refusal, UnknownParameterError) else 1


# Remedies, by pydantic's types of errors.
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
    """Convert one of pydantic's errors to a RequestError."""
    context = found.get("ctx", {})
    wrong = context.get("error")
    if isinstance(wrong, WrongMemberError):
        path = _path(*found["loc"], wrong.name)
        message = wrong.message.replace("{path!r}", repr(path), 1).replace("{path}", path, 1)
        return wrong.kind(message, wrong.remedy, path)
    path = _path(*found["loc"])
    bounds = {name: f"{b:g}" if isinstance(b, float) else b for name, b in context.items()}
    expected = _EXPECTED.get(found["type"], "another value").format(**bounds)
    return RequestError(f"{path} = {_shown(found['input'])} is not valid", f"send {expected}", path)


def _path(*parts: str | int) -> str:
    """Return the path of a member in the body, as in "messages[2].content"."""
    path = ""
    for part in parts:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part and not part.startswith("<"):  # "<...>" is the tag of a union, no member
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


def _stop_strings(raw: Any) -> Any:
    if isinstance(raw, str):
        return [raw] if raw else []
    is_list = isinstance(raw, list) and len(raw) <= MAX_STOP_STRINGS
    if not is_list or not all(isinstance(text, str) for text in raw):
        raise WrongMemberError(
            "{path} is not valid", f"send a string, or at most {MAX_STOP_STRINGS} strings"
        )
    return raw


def _check_metadata(raw: Any) -> Any:
    """Check the bounds of metadata before it is validated; null becomes an empty text."""
    if not isinstance(raw, dict):
        return raw
    if len(raw) > MAX_METADATA or any(
        len(name) > MAX_METADATA_NAME or (isinstance(text, str) and len(text) > MAX_METADATA_TEXT)
        for name, text in raw.items()
    ):
        raise WrongMemberError(
            "{path} is too long",
            f"send at most {MAX_METADATA} texts of {MAX_METADATA_TEXT} characters, with names "
            f"of {MAX_METADATA_NAME}",
        )
    return {name: "" if text is None else text for name, text in raw.items()}


def check_named(name: str) -> str:
    """Check that a model is named; a validator."""
    if not name:
        raise WrongMemberError("{path} is missing", "send a name that GET /v1/models lists")
    return name


Count = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
TokenId = Annotated[int, Field(ge=0, le=MOST_TOKENS)]
Metadata = Annotated[dict[str, str], BeforeValidator(_check_metadata)]
StopStrings = Annotated[list[str], BeforeValidator(_stop_strings)]


class ModelBody(Body):
    """The body of a request to a model.

    Attributes:
        model: name of the model; "" for the served one.
    """

    model: str = ""


class TurnBody(ModelBody, ABC):
    """The body of a request for a turn, in any API.

    Attributes:
        model: name of the model; required, as in the vendors' APIs.
        store: whether the session may stay after the turn.
        session_id: the session that the client names; "" to find it by the messages.
        metadata: the client's own notes.
        tool_kinds: types of tools that clients run themselves.
        call_prefix: prefix of the ids of tool calls.
    """

    tool_kinds: ClassVar[frozenset[str]] = frozenset()
    call_prefix: ClassVar[str] = "call_"

    model: Annotated[str, AfterValidator(check_named)] = Field(default="", validate_default=True)
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
        """Most tokens of the answer; None if the client gives no bound."""

    @property
    def shown_logprobs(self) -> int | None:
        """Number of alternatives shown of each token; None: no log-probabilities at all."""
        return None

    @property
    def grammar(self) -> Grammar | None:
        """The grammar that the answer has to follow; None for free text."""
        return None

    @classmethod
    def without_foreign(cls, raw: dict[str, Any]) -> dict[str, Any]:
        """Return a body without the tools that a vendor would run; the model does not get them.

        Args:
            raw: the body as the client sent it.
        """
        tools = raw.get("tools")
        if not isinstance(tools, list):
            return raw
        return {**raw, "tools": [tool for tool in tools if not cls._is_foreign(tool)]}

    @classmethod
    def _is_foreign(cls, tool: Any) -> bool:
        kind = tool.get("type") if isinstance(tool, dict) else None
        return isinstance(kind, str) and kind not in cls.tool_kinds

    @property
    def cache_key(self) -> str:
        """The client's name of the conversation, see `agents.py`; "" if it gives none."""
        return ""

    @property
    def retention(self) -> Retention:
        """How long the client wants the KV cache to be kept at least."""
        return NO_RETENTION

    @property
    def predicted(self) -> str:
        """The client's guess of most of the answer; "" if it gives none."""
        return ""

    @property
    def tool_use(self) -> ToolUse:
        """The tools that the answer may or has to call."""
        return ToolUse()

    @property
    def template_arguments(self) -> dict[str, Any]:
        """The client's arguments of the chat template."""
        return {}

    @property
    def beginning(self) -> str:
        """The client's own beginning of the answer; "" if it gives none."""
        return ""

    @property
    def own_sampling(self) -> dict[str, Any]:
        """Sampling values that only this API has; None where the client gives none."""
        return {}

    def sampling(self, temperature: float, choice: int = 0) -> dict[str, Any]:
        """Return the client's sampling values, by the names of `SamplingParams`.

        Args:
            temperature: the default temperature.
            choice: index of the answer among the request's answers, which have different seeds.
        """
        values = {
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
        return {name: value for name, value in values.items() if value is not None}
