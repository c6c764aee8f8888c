"""Settings of both processes: defaults < TOML file < environment < flags, checked all at once.

A process declares one frozen pydantic model whose fields are sections (nested models). Key `bytes`
of section `dram` is written

    [dram]                in the file
    bytes = "2GB"
    KVD_DRAM__BYTES=2GB   in the environment (prefix KVD; two underscores between section and key)

A field that maps names to sections is a table of tables: `[tenants.acme]` in the file,
KVD_TENANTS__ACME__TTL in the environment (where the name is always lower case). Its known keys are
written "tenants.*.ttl"; a name may itself contain dots. A field that maps names to plain values is
one setting: a table in the file, and in the environment a text that its type parses.

A bad value or an unknown key anywhere refuses the start. The one-line error lists every problem
with what is accepted. A flag that is None was not given. The value of a setting marked HIDDEN is
shown neither in an error nor by `config show`.

An operator who edits the file expects it to take effect, so a flag that overrides the file is
logged (warn_of_overridden). The environment is not: it is meant to come before the file.
"""

import difflib
import os
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError

from shared.process.log import get_logger
from shared.types.errors import ConfigError
from shared.types.setting_types import HIDDEN, Section

ANY_NAME = "*"  # stands for the name of a table in known keys
HIDDEN_TEXT = "(hidden)"
NEAR = 0.8  # a name this similar to one of ours is a misspelling, not foreign: KVD_STATE_DRI

log = get_logger(__name__)


class InvalidSettingsError(ConfigError):
    """A setting is unknown or unusable, or the settings file cannot be read.

    Attributes:
        problems: the problems one by one, for callers with a line for each.
    """

    reason = "invalid_settings"

    def __init__(self, message: str, remedy: str, problems: Sequence[str] = ()) -> None:
        super().__init__(message, remedy)
        self.problems = tuple(problems) or (str(self),)


def invalid_settings(problems: Sequence[str]) -> InvalidSettingsError:
    """Return the error that names every problem."""
    remedy = "correct the settings and start again"
    return InvalidSettingsError("; ".join(problems), remedy, problems)


S = TypeVar("S", bound=Section)


@dataclass(frozen=True)
class Overridden:
    """A key of the file that has no effect, because the command line has another value.

    Attributes:
        key: the dotted key.
        in_file: its value in the file.
        in_force: its value on the command line.
    """

    key: str
    in_file: str
    in_force: str


@dataclass(frozen=True)
class LoadedSettings(Generic[S]):
    """Settings and where each came from.

    Attributes:
        settings: the frozen, checked model.
        provenance: source of each key, "default", "file", "env" or "flag": the strongest one that
            names it. It has every key of the model; of tables by name, the keys that were given.
        file: the settings file; None if there is none.
        overridden: keys of the file that the command line overrides.
    """

    settings: S
    provenance: Mapping[str, str]
    file: Path | None = None
    overridden: tuple[Overridden, ...] = ()

    def rows(self) -> Iterator[tuple[str, str, str]]:
        """Yield every setting as (dotted key, value for people, source), in the model's order."""
        for key, _, shown in self._shown():
            yield key, shown if isinstance(shown, str) else _show(shown), self.provenance[key]

    def values(self) -> dict[str, object]:
        """Return every setting for JSON, by dotted key: sizes in bytes, durations in seconds.

        A setting with a word in place of a number ("auto", "never") has the word. Hidden ones are
        hidden.
        """
        return {
            key: value if isinstance(value, int | float) and shown != HIDDEN_TEXT else shown
            for key, value, shown in self._shown()
        }

    def _shown(self) -> Iterator[tuple[str, Any, Any]]:
        """Yield every key with its value and the value to show, serialized or HIDDEN_TEXT."""
        values = self.settings.model_dump()
        serialized = self.settings.model_dump(mode="json")
        known = tuple(_leaf_keys(type(self.settings)))
        hidden = frozenset(_leaf_keys(type(self.settings), only_hidden=True))
        for key in self.provenance:
            path = _path(key, known)
            shown: Any = _at(serialized, path)
            is_shown = not shown or _pattern(key, known) not in hidden
            yield key, _at(values, path), shown if is_shown else HIDDEN_TEXT


def _at(values: Mapping[str, Any], path: Sequence[str]) -> Any:
    """Return the value at a path in nested tables."""
    found: Any = values
    for part in path:
        found = found[part]
    return found


def load_settings(
    model: type[S],
    toml_path: Path | None,
    env_prefix: str,
    flags: Mapping[str, object],
    environ: Mapping[str, str] = os.environ,
    other_variables: Collection[str] = (),
) -> LoadedSettings[S]:
    """Read and check the settings of one process.

    Args:
        model: the settings model.
        toml_path: a file that must exist, or None for no file.
        env_prefix: "KVD" for variables such as KVD_DRAM__BYTES.
        flags: values from the command line by dotted key; None: not given.
        environ: the environment; another one in tests.
        other_variables: variables with the prefix that are not settings, but options of commands.

    Raises:
        InvalidSettingsError: there are problems; all are named, separated by "; ".
    """
    known = tuple(_leaf_keys(model))
    entries: dict[str, tuple[str, object]] = {}
    problems: list[str] = []
    in_file = _flatten(_read_toml(toml_path), known)
    by_flag = {key: value for key, value in flags.items() if value is not None}
    for source, values in (
        ("file", in_file),
        ("env", _from_environ(env_prefix, known, environ, other_variables, problems)),
        ("flag", by_flag),
    ):
        entries.update({key: (source, value) for key, value in values.items()})
    problems += [
        f"{key} ({source}): {_unknown(key, known)}"
        for key, (source, _) in entries.items()
        if not _path(key, known)
    ]
    usable = {key: value for key, value in entries.items() if _path(key, known)}
    settings, unusable = _validate(model, usable, known)
    problems += unusable
    if problems or settings is None:
        raise invalid_settings(problems)
    fixed = [key for key in known if ANY_NAME not in key]
    named = sorted(set(entries) - set(fixed))
    provenance = {key: entries[key][0] if key in entries else "default" for key in (*fixed, *named)}
    overridden = tuple(_overridden(model, known, in_file, by_flag))
    return LoadedSettings(settings, provenance, toml_path, overridden)


def warn_of_overridden(loaded: LoadedSettings[S]) -> None:
    """Log each key of the file that has no effect, because the command line has another value."""
    for setting in loaded.overridden:
        log.warning(
            "setting_overridden",
            setting=setting.key,
            file=str(loaded.file),
            in_file=setting.in_file,
            in_force=setting.in_force,
            remedy="the command line overrides the file: remove the setting from one of them",
        )


def _overridden(
    model: type[S],
    known: tuple[str, ...],
    in_file: Mapping[str, object],
    by_flag: Mapping[str, object],
) -> Iterator[Overridden]:
    hidden = frozenset(_leaf_keys(model, only_hidden=True))
    for key in in_file:
        if key in by_flag and (texts := (_text(in_file[key]), _text(by_flag[key])))[0] != texts[1]:
            is_hidden = _pattern(key, known) in hidden
            yield Overridden(key, *((HIDDEN_TEXT, HIDDEN_TEXT) if is_hidden else texts))


def _text(value: object) -> str:
    """Return a value as text. A list of one value gives the same text as the value."""
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _validate(
    model: type[S], entries: Mapping[str, tuple[str, object]], known: tuple[str, ...]
) -> tuple[S | None, list[str]]:
    """Build the model from flat keys. On failure return what is wrong with each key."""
    nested: dict[str, Any] = {}
    hidden = frozenset(_leaf_keys(model, only_hidden=True))
    for key, (_, value) in entries.items():
        *sections, name = _path(key, known)
        section = nested
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = value
    try:
        return model.model_validate(nested), []
    except ValidationError as error:
        found = {}
        for problem in error.errors(include_url=False):
            location = tuple(part for part in problem["loc"] if part != "[key]")
            key = next((k for k in _prefixes(location) if k in entries), _dotted(location))
            source, value = entries.get(key, ("default", None))
            what = problem["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
            shown = HIDDEN_TEXT if _pattern(key, known) in hidden else repr(str(value)[:60])
            named = f"{key} = {shown} ({source})" if key in entries else key
            found[key] = f"{named}: {what}" if named else what  # unnamed: it concerns several keys
        return None, list(found.values())


def _prefixes(location: tuple[int | str, ...]) -> Iterator[str]:
    """Yield prefixes of a pydantic location, longest first: a list's items have no own setting."""
    for length in range(len(location), 0, -1):
        yield _dotted(location[:length])


def _dotted(location: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in location)


def _leaf_keys(
    model: type[BaseModel], prefix: str = "", *, only_hidden: bool = False
) -> Iterator[str]:
    for name, field in model.model_fields.items():
        kind: Any = field.annotation
        if get_origin(kind) is Mapping and _is_section(get_args(kind)[1]):
            inner = f"{prefix}{name}.{ANY_NAME}."
            yield from _leaf_keys(get_args(kind)[1], inner, only_hidden=only_hidden)
        elif _is_section(kind):
            yield from _leaf_keys(kind, f"{prefix}{name}.", only_hidden=only_hidden)
        elif HIDDEN in field.metadata or not only_hidden:
            yield prefix + name


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _path(key: str, known: tuple[str, ...]) -> list[str]:
    """Split a dotted key at its sections; return [] if there is no such setting."""
    table, _, inner = key.partition(".")
    name, _, last = inner.rpartition(".")
    if name and f"{table}.{ANY_NAME}.{last}" in known:
        return [table, name, last]
    return key.split(".") if key in known else []


def _pattern(key: str, known: tuple[str, ...]) -> str:
    """Return a dotted key as known keys are written, with ANY_NAME in place of a table's name."""
    path = _path(key, known)
    return key if key in known or not path else f"{path[0]}.{ANY_NAME}.{path[-1]}"


def _read_toml(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        may_not = isinstance(error, PermissionError)
        raise InvalidSettingsError(
            f"cannot read the settings file {path} ({error.strerror})",
            "use sudo, or let this user read it"
            if may_not
            else "name an existing file with --config",
        ) from error
    except (ValueError, RecursionError) as error:  # not UTF-8, not TOML, huge numbers, deep nesting
        raise InvalidSettingsError(
            f"the settings file {path} is not valid TOML ({error})", "correct the file"
        ) from error


def _flatten(
    table: Mapping[str, Any], known: tuple[str, ...], prefix: str = ""
) -> dict[str, object]:
    """Flatten tables to dotted keys, except a table that is itself the value of a known key."""
    flat: dict[str, object] = {}
    for name, value in table.items():
        key = prefix + name
        if isinstance(value, Mapping) and not _path(key, known):
            flat.update(_flatten(value, known, key + "."))
        else:
            flat[key] = value
    return flat


def _from_environ(
    prefix: str,
    known: tuple[str, ...],
    environ: Mapping[str, str],
    other_variables: Collection[str],
    problems: list[str],
) -> dict[str, object]:
    """Return the settings in the environment by dotted key; add misspelled ones to `problems`.

    A misspelled name is one underscore for two, or one close to a known name. Foreign names are
    ignored: orchestrators put names such as KVD_SERVICE_HOST into every environment.
    """
    right = {key.replace(".", "_"): _variable(prefix, key) for key in known if ANY_NAME not in key}
    right |= {name.removeprefix(f"{prefix}_").lower(): name for name in other_variables}
    sections = _sections(known)
    found: dict[str, object] = {}
    for variable, value in environ.items():
        if not variable.startswith(prefix + "_") or variable in other_variables:
            continue
        name = variable.removeprefix(prefix + "_").lower()
        if "__" in name or name in sections:  # a section alone is refused with its keys
            found[name.replace("__", ".")] = value
        elif name in right:
            problems.append(
                f"{variable} (env): this variable does not set anything, write {right[name]}"
            )
        elif near := difflib.get_close_matches(name, right, n=1, cutoff=NEAR):
            problems.append(
                f"{variable} (env): there is no such setting, did you mean {right[near[0]]}?"
            )
    return found


def _variable(prefix: str, key: str) -> str:
    return f"{prefix}_{key.replace('.', '__').upper()}"


def _unknown(key: str, known: tuple[str, ...]) -> str:
    # Keys of a table by name are shown with the name in the given key, or with a placeholder.
    section, _, name = key.partition(".")
    name = name.rpartition(".")[0] or name or "NAME"
    known = tuple(
        k.replace(ANY_NAME, name if k.startswith(f"{section}.") else "NAME") for k in known
    )
    inside = [k for k in known if k.startswith(key + ".")]
    if inside:
        return f"this is a section: set one of its keys, such as {inside[0]}"
    same_section = [k for k in known if k.split(".")[0] == section]
    if close := difflib.get_close_matches(key, (*known, *_sections(known)), n=1, cutoff=NEAR):
        return f"there is no such setting, did you mean {close[0]}?"
    if same_section:
        names = ", ".join(k.removeprefix(f"{section}.") for k in same_section)
        return f"there is no such setting, section {section} has {names}"
    return f"there is no such setting, the sections are {', '.join(_sections(known))}"


def _sections(known: tuple[str, ...]) -> list[str]:
    """Return the names of sections, and keys that are in no section."""
    return sorted({key.split(".", maxsplit=1)[0] for key in known})


def _show(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()  # as it is written in the file
    if isinstance(value, list):
        return ", ".join(str(item) for item in value) or "(none)"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={item}" for name, item in value.items()) or "(none)"
    return "(none)" if value is None else str(value)
