"""Arguments of a chat template besides messages and tools: `chat_template_kwargs`. Pure.

A template uses the arguments whose names it knows, and ignores the others.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, TypeAlias

from inference_svc.core.errors import InvalidTurnError

Arguments: TypeAlias = Mapping[str, Any]  # JSON by names

MAX_ARGUMENTS = 64
MAX_DEPTH = 16  # of nested objects and lists: templates recurse to write them into a prompt
MAX_CHARACTERS = 16384  # as JSON
EFFORT = "reasoning_effort"
# Templates have different names for it: Qwen's and its followers', DeepSeek's and Granite's.
UNTHINKING: Arguments = {"enable_thinking": False, "thinking": False}
# Arguments that the service passes, or that Transformers would not pass to the template.
RESERVED = frozenset(
    {
        *("messages", "conversation", "tools", "chat_template", "add_generation_prompt"),
        *("continue_final_message", "tokenize", "tokenizer_kwargs", "sanitize_control_tokens"),
        *("padding", "truncation", "max_length", "return_tensors", "return_dict"),
        *("return_assistant_tokens_mask", "raise_exception", "strftime_now", "self"),
    }
)
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_SPECIAL = ("_token", "_tokens")  # the model's own: eos_token, extra_special_tokens


def check_arguments(arguments: Arguments) -> None:
    """Check the template's arguments, from a client or from the operator.

    Raises:
        InvalidTurnError: a name is invalid or reserved, or there are too many arguments.
    """
    for name in arguments:
        if not _NAME.fullmatch(name):
            raise InvalidTurnError(
                f"{name[:60]!r} is not a valid name of a chat template's argument",
                "send up to 64 letters, digits and underscores",
            )
        if name in RESERVED or name.endswith(_SPECIAL):
            raise InvalidTurnError(
                f"the service itself sets the chat template's argument {name!r}", "leave it out"
            )
    if len(arguments) > MAX_ARGUMENTS or _is_deep(arguments):
        raise InvalidTurnError(
            "the chat template's arguments are too many, or nested too deeply",
            f"send at most {MAX_ARGUMENTS} arguments, of at most {MAX_DEPTH} levels",
        )
    _check_length(canonical_arguments(arguments))


def canonical_arguments(arguments: Arguments) -> str:
    """Write arguments as one text, "" if there are none: equal texts mean equal arguments.

    Raises:
        InvalidTurnError: a value is not JSON.
    """
    if not arguments:
        return ""
    try:
        return json.dumps(
            arguments, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False
        )
    except (TypeError, ValueError) as error:
        raise InvalidTurnError(
            f"the chat template's arguments are not JSON ({error})", "send a JSON object"
        ) from error


def read_arguments(text: str) -> dict[str, Any]:
    """Parse arguments that were written as JSON; "" has none. They are not checked.

    Raises:
        InvalidTurnError: it is not a JSON object, or too long.
    """
    _check_length(text)
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise InvalidTurnError(
            "the chat template's arguments are not JSON", "send a JSON object"
        ) from error
    if not isinstance(found, dict):
        raise InvalidTurnError(
            "the chat template's arguments are not an object", "send a JSON object"
        )
    return found


def parse_arguments_setting(value: object) -> object:
    """Parse the operator's arguments: a table, or its JSON; a validator of the settings.

    Raises:
        ValueError: they are invalid.
    """
    try:
        given = read_arguments(value) if isinstance(value, str) else value
        if isinstance(given, Mapping):
            check_arguments(given)
    except InvalidTurnError as error:
        raise ValueError(str(error)) from error
    return given


def effort_arguments(effort: str | None) -> dict[str, Any]:
    """Return the arguments for a reasoning effort; none if the client did not set one."""
    if effort is None:
        return {}
    return {EFFORT: effort, **(UNTHINKING if effort == "none" else {})}


def _check_length(text: str) -> None:
    if len(text) > MAX_CHARACTERS:
        raise InvalidTurnError(
            "the chat template's arguments are too long",
            f"send at most {MAX_CHARACTERS} characters of JSON",
        )


def _is_deep(arguments: Arguments) -> bool:
    level: list[Any] = [arguments]
    for _ in range(MAX_DEPTH):
        inner = (each.values() if isinstance(each, Mapping) else each for each in level)
        level = [value for values in inner for value in values if isinstance(value, Mapping | list)]
    return bool(level)
