"""Options of a command as values: a field of a dataclass is an option of the command line.

    @dataclass(frozen=True)
    class Options:
        rounds: Annotated[int, typer.Option(min=1, help="How often.")] = 3

    @app.command()
    @command(Options)
    def measure(options: Options) -> None: ...

So an option's value, its default and its help text are in one place.
"""

from collections.abc import Callable, Collection
from dataclasses import MISSING, fields
from inspect import Parameter, Signature
from typing import Annotated, Any, get_args, get_type_hints

from typer.models import OptionInfo

from shared.types.errors import InvalidInputError

TEXT = "<str>"  # shown in help for a value that is parsed here


class BadListError(InvalidInputError):
    """A text is not a list of numbers."""

    reason = "bad_list"


def ignore_progress(_what: str) -> None:
    """Ignore a report of progress."""


def names_of(text: str, known: Collection[str], what: str) -> list[str]:
    """Parse a list of names separated by commas, in any case; return each once.

    Args:
        text: the names.
        known: the valid names.
        what: the kind of thing that has a name, for the error message.

    Raises:
        InvalidInputError: a name is not known, or there is none.
    """
    names = list(dict.fromkeys(part.strip().lower() for part in text.split(",") if part.strip()))
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise InvalidInputError(
            f"there is no such {what}: {', '.join(unknown) or 'none was given'}",
            f"give one or more of {', '.join(known)}",
        )
    return names


def command(*groups: type[Any], order: str = "") -> Callable[[Callable[..., None]], Any]:
    """Return a decorator for a function that takes one value of each of these dataclasses.

    It makes the function a command. A field is an option if it is annotated with a `typer.Option`;
    other fields keep their defaults. For a default that is parsed, the field's metadata may have
    its `text`.

    Args:
        groups: dataclasses; no two of them have an option of the same name.
        order: names of fields, separated by blanks: these are the options, in this order. "": all,
            in the order of the dataclasses.
    """

    def decorate(run: Callable[..., None]) -> Any:
        found = {name: (group, option) for group in groups for name, option in _options(group)}
        names = order.split() or list(found)

        def call(**given: Any) -> None:
            values: dict[type[Any], dict[str, Any]] = {group: {} for group in groups}
            for name, value in given.items():
                values[found[name][0]][name] = value
            run(*(group(**values[group]) for group in groups))

        call.__name__, call.__doc__ = run.__name__, run.__doc__
        call.__signature__ = Signature([found[name][1] for name in names])  # type: ignore[attr-defined]
        return call

    return decorate


def _options(group: type[Any]) -> list[tuple[str, Parameter]]:
    """Return the options of a dataclass as parameters of a function, with their fields' names."""
    hints = get_type_hints(group, include_extras=True)
    found = []
    for field in fields(group):
        option = next((i for i in get_args(hints[field.name]) if isinstance(i, OptionInfo)), None)
        if option is None:
            continue
        kind = hints[field.name] if option.parser is None else Annotated[str, option]
        default = Parameter.empty if field.default is MISSING else field.default
        if option.parser is not None:
            default = field.metadata.get("text", as_text(default))
        parameter = Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        found.append((field.name, parameter))
    return found


def as_text(value: Any) -> Any:
    """Return a default as on the command line: ((900, 100), (500, 500)) as "900/100,500/500"."""
    if not isinstance(value, tuple):
        return value
    parts = ("/".join(map(str, part)) if isinstance(part, tuple) else str(part) for part in value)
    return ",".join(parts)


def one_of(what: str, *names: str) -> Callable[[str], str]:
    """Return a parser of one name; "" is accepted only if it is among them."""
    known = [name for name in names if name]

    def parse(text: str) -> str:
        if text not in names:
            listed = f"{', '.join(known[:-1])} or {known[-1]}"
            raise InvalidInputError(f"there is no such {what}: {text}", f"give {listed}")
        return text

    return parse


def some_of(what: str, *names: str) -> Callable[[str], tuple[str, ...]]:
    """Return a parser of several names, separated by commas."""

    def parse(text: str) -> tuple[str, ...]:
        found = tuple(text.split(","))
        if not set(found) <= set(names):
            raise InvalidInputError(
                f"there is no such {what}: {text}", f"give one or more of {', '.join(names)}"
            )
        return found

    return parse


def numbers(text: str, least: int = 1) -> tuple[int, ...]:
    """Parse a list of numbers such as "1,8,24"; "" is the empty list.

    Raises:
        BadListError: a part is no number, or one below `least`.
    """
    try:
        found = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise BadListError(f"{text!r} is not a list of numbers", "write it as 1,8,24") from error
    if any(number < least for number in found):
        raise BadListError(f"{text!r} contains a number below {least}", "give larger numbers")
    return found
