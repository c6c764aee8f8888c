"""Reload: changes of settings while a process runs, all at once or not at all.

A process names the keys that it can change while it runs (LIVE_KEYS in its config.py): dotted keys,
or whole sections or tables. A reload reads file, environment and flags again. A key that cannot
change keeps its value until the next start, and is reported. If there is any problem, nothing
changes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from shared.config.settings import InvalidSettingsError, LoadedSettings
from shared.types.errors import ConfigError
from shared.types.setting_types import Section

S = TypeVar("S", bound=Section)


class ReloadRefusedError(ConfigError):
    """The new settings cannot be used; those in force stay."""

    reason = "reload_refused"


@dataclass(frozen=True)
class Changes(Generic[S]):
    """The result of a reload.

    Attributes:
        live: the settings from now on: the new values of live keys, the old ones of all others.
        applied: keys that have changed now.
        needs_restart: keys that will change at the next start.
    """

    live: LoadedSettings[S]
    applied: tuple[str, ...]
    needs_restart: tuple[str, ...]


def compare_settings(
    old: LoadedSettings[S], new: LoadedSettings[S], live: Sequence[str]
) -> Changes[S]:
    """Compare the settings in force with those that were read.

    Args:
        old: the settings in force. A key that waits for the next start is reported at each reload.
        new: the settings that were just read.
        live: the process's LIVE_KEYS.

    Raises:
        InvalidSettingsError: the new values of live keys do not fit the old values of others.
    """
    before, after = dict(_leaves(old.settings)), dict(_leaves(new.settings))
    different = [
        key
        for key in dict.fromkeys((*before, *after))
        if key not in before or key not in after or before[key] != after[key]
    ]
    applied = tuple(key for key in different if is_live(key, live))
    if not applied:
        return Changes(replace(old, overridden=new.overridden), (), tuple(different))
    try:
        settings = type(old.settings).model_validate(_merge(old.settings, new.settings, live))
    except ValidationError as error:
        what = "; ".join(problem["msg"] for problem in error.errors(include_url=False))
        raise InvalidSettingsError(
            f"some changes need a restart ({what})", "restart, or undo these changes"
        ) from error
    provenance = {key: where for key, where in old.provenance.items() if not is_live(key, live)}
    provenance |= {key: where for key, where in new.provenance.items() if is_live(key, live)}
    needs_restart = tuple(key for key in different if key not in applied)
    loaded = LoadedSettings(settings, _sort_keys(provenance, old, new), new.file, new.overridden)
    return Changes(loaded, applied, needs_restart)


class LiveSettings(Generic[S]):
    """The settings in force in this process, and the callbacks that receive new ones.

    Args:
        loaded: the settings that the process started with.
        read: reads file, environment and flags again; raises InvalidSettingsError.
        live: the process's LIVE_KEYS.

    Attributes:
        loaded: the settings in force. Read them each time instead of keeping them.
        checks: called with settings before these are in force; they may raise a ConfigError.
        on_change: called with new settings. They must not fail: that is what `checks` are for.
    """

    def __init__(
        self,
        loaded: LoadedSettings[S],
        read: Callable[[], LoadedSettings[S]],
        live: Sequence[str],
    ) -> None:
        self.loaded = loaded
        self._read = read
        self._live = tuple(live)
        self.checks: list[Callable[[S], None]] = []
        self.on_change: list[Callable[[S], None]] = []

    def reload(self) -> Changes[S]:
        """Read the settings again and apply those that may change.

        Raises:
            ReloadRefusedError: they cannot be used; nothing has changed.
        """
        try:
            found = compare_settings(self.loaded, self._read(), self._live)
            for check in self.checks:
                check(found.live.settings)
        except ConfigError as error:
            raise ReloadRefusedError(
                f"nothing was changed: {error.message}", "correct the settings, and reload again"
            ) from error
        self.loaded = found.live
        for apply in self.on_change:  # even without a changed key: certificate files may be new
            apply(found.live.settings)
        return found


def fixed_settings(settings: S) -> LiveSettings[S]:
    """Return settings that no reload changes, for a process that reads no file."""
    loaded = LoadedSettings(settings, {})
    return LiveSettings(loaded, lambda: loaded, ())


def is_live(key: str, live: Sequence[str]) -> bool:
    """Whether a reload may change a key."""
    return any(key == name or key.startswith(f"{name}.") for name in live)


def _leaves(model: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value with its dotted key; of tables by name, only values that were given."""
    for name in type(model).model_fields:
        yield from _leaves_of(getattr(model, name), f"{prefix}{name}")


def _leaves_of(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, BaseModel):
        yield from _leaves(value, f"{key}.")
    elif isinstance(value, Mapping) and any(isinstance(v, BaseModel) for v in value.values()):
        for name, section in value.items():
            for field in sorted(section.model_fields_set):
                yield from _leaves_of(getattr(section, field), f"{key}.{name}.{field}")
            if not section.model_fields_set:
                yield f"{key}.{name}", section
    elif not (isinstance(value, Mapping) and not value):
        yield key, value


def _merge(old: BaseModel, new: BaseModel, live: Sequence[str], prefix: str = "") -> dict[str, Any]:
    """Return what was given: of live keys in the new settings, of others in the old ones."""
    merged: dict[str, Any] = {}
    for name in type(old).model_fields:
        key = f"{prefix}{name}"
        before, after = getattr(old, name), getattr(new, name)
        if not is_live(key, live) and isinstance(before, BaseModel):
            merged[name] = _merge(before, after, live, f"{key}.")
        elif name in (source := new if is_live(key, live) else old).model_fields_set:
            merged[name] = after if source is new else before
    return merged


def _sort_keys(
    provenance: Mapping[str, str], old: LoadedSettings[S], new: LoadedSettings[S]
) -> dict[str, str]:
    """Sort keys: those of the model in its order, then those of tables by name."""
    order = dict.fromkeys((*old.provenance, *new.provenance))
    return {key: provenance[key] for key in order if key in provenance}
