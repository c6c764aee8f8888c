"""Types of settings: sizes, durations and words as people write them in a TOML file.

The serializers are for people (`config show`). model_dump() in Python mode keeps the numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from shared.types.session_key import InvalidNameError, session_key
from shared.types.units import format_bytes, format_duration, parse_bytes, parse_duration_s


@dataclass(frozen=True)
class Hidden:
    """Marks a setting whose value is never shown: Annotated[str, HIDDEN]."""


HIDDEN = Hidden()


class Section(BaseModel):
    """Base of all settings models: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


def _to_bytes(value: object) -> object:
    return parse_bytes(value) if isinstance(value, str) else value


def _to_bytes_or_auto(value: object) -> object:
    return None if value == "auto" else _to_bytes(value)


def _to_bytes_or_none(value: object) -> object:
    return None if value == "none" else _to_bytes(value)


def _to_number_or_none(value: object) -> object:
    return None if value == "none" else value


def _to_number_or_auto(value: object) -> object:
    return None if value == "auto" else value


def _to_int_or_any(value: object) -> object:
    return None if value == "any" else value


def _to_seconds(value: object) -> object:
    return parse_duration_s(value) if isinstance(value, str) else value


def _to_seconds_or_never(value: object) -> object:
    return None if value == "never" else _to_seconds(value)


def to_list(value: object) -> object:
    """Return a list for a text "a,b", as the environment has it; other values unchanged."""
    return _parts(value) if isinstance(value, str) else value


def _to_path_or_none(value: object) -> object:
    return None if value == "" else value


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _to_weights(value: object) -> object:
    if not isinstance(value, str):
        return value
    pairs = [part.partition("=") for part in _parts(value)]
    if not all(equals for _, equals, _ in pairs):
        raise ValueError("write shares as name=2,other=0.5")
    return {name.strip(): weight for name, _, weight in pairs}


def _tenant_name(value: str) -> str:
    try:
        return session_key(value, "", "any").tenant
    except InvalidNameError as error:
        raise ValueError(str(error)) from error


def _show_bytes(value: int | None) -> str:
    return "auto" if value is None else format_bytes(value)


def _show_quota(value: int | None) -> str:
    return "none" if value is None else format_bytes(value)


def _show_int(value: int | None) -> str:
    return "any" if value is None else str(value)


def _show_number(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"


def _show_auto(value: float | None) -> str:
    return "auto" if value is None else str(value)


def _show_seconds(value: float | None) -> str:
    return "never" if value is None else format_duration(value)


ByteSize = Annotated[
    int, BeforeValidator(_to_bytes), PlainSerializer(_show_bytes, when_used="json")
]
ByteSizeOrAuto = Annotated[  # None: "auto"
    int | None, BeforeValidator(_to_bytes_or_auto), PlainSerializer(_show_bytes, when_used="json")
]
ByteSizeOrNone = Annotated[  # None: "none", no bound
    int | None, BeforeValidator(_to_bytes_or_none), PlainSerializer(_show_quota, when_used="json")
]
IntOrAny = Annotated[  # None: "any"
    int | None, BeforeValidator(_to_int_or_any), PlainSerializer(_show_int, when_used="json")
]
CountOrNone = Annotated[  # None: "none", no bound
    int | None,
    BeforeValidator(_to_number_or_none),
    PlainSerializer(_show_number, when_used="json"),
]
CountOrAuto = Annotated[  # None: "auto"
    int | None,
    BeforeValidator(_to_number_or_auto),
    PlainSerializer(_show_auto, when_used="json"),
]
NumberOrAuto = Annotated[  # None: "auto"
    float | None,
    BeforeValidator(_to_number_or_auto),
    PlainSerializer(_show_auto, when_used="json"),
]
RateOrNone = Annotated[  # None: "none", no bound
    float | None,
    BeforeValidator(_to_number_or_none),
    PlainSerializer(_show_number, when_used="json"),
]
Duration = Annotated[  # seconds
    float, BeforeValidator(_to_seconds), PlainSerializer(_show_seconds, when_used="json")
]
DurationOrNever = Annotated[  # seconds; None: "never"
    float | None,
    BeforeValidator(_to_seconds_or_never),
    PlainSerializer(_show_seconds, when_used="json"),
]
TextList = Annotated[tuple[str, ...], BeforeValidator(to_list)]  # in the environment: "a,b"
PathOrNone = Annotated[Path | None, BeforeValidator(_to_path_or_none)]  # None: ""
TenantName = Annotated[str, AfterValidator(_tenant_name)]  # a key of a table of tables
Weight = Annotated[float, Field(gt=0, le=1000)]
TenantWeights = Annotated[  # in the environment: "acme=2,other=0.5"
    Mapping[TenantName, Weight], BeforeValidator(_to_weights)
]
