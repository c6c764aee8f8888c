"""Installs planned files, and removes them again.

1. A file is never seen half written: it is written beside its place and renamed.
2. Existing settings belong to the operator. The shipped file is then written beside them, with NEW
   at the end of its name, unless it is the same.
3. Only files that were installed are removed: settings that were changed stay.
4. A link replaces only a link: another program of the same name is left alone.
"""

import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

from kvd.errors import InstallError
from kvd.install.units import Planned, PlannedLink

NEW = ".new"
FILE_MODE = 0o644

# The action on a file, done or planned. "beside": the file is kept, the shipped one written with
# NEW; "foreign": left alone, as this program did not install it.
Deed = Literal["written", "replaced", "unchanged", "beside", "removed", "kept", "linked", "foreign"]


def place(files: Iterable[Planned], *, dry_run: bool) -> Iterator[tuple[Path, Deed]]:
    """Write files that are missing or differ.

    Yields:
        Each path with its action, which in a dry run is only planned.

    Raises:
        InstallError: a file cannot be written.
    """
    for file in files:
        if isinstance(file, PlannedLink):
            yield file.path, _place_link(file, dry_run=dry_run)
            continue
        current = _read(file.path)
        if current == file.text:
            deed: Deed = "unchanged"
        elif current is None:
            deed = "written"
        else:
            deed = "beside" if file.is_settings else "replaced"
        if not dry_run and deed != "unchanged":
            _write(_beside(file.path) if deed == "beside" else file.path, file.text)
        yield file.path, deed


def _place_link(link: PlannedLink, *, dry_run: bool) -> Deed:
    deed: Deed = "linked"
    if link.path.is_symlink():
        deed = "unchanged" if _target(link.path) == link.target else "replaced"
    elif link.path.exists():
        return "foreign"
    if not dry_run and deed != "unchanged":
        try:
            link.path.parent.mkdir(parents=True, exist_ok=True)
            temporary = link.path.with_name(f".{link.path.name}{NEW}")
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(link.target)
            temporary.replace(link.path)
        except OSError as error:
            raise _install_error("link", link.path, error) from error
    return deed


def _target(path: Path) -> Path | None:
    """Return the target of a symbolic link; None: it is no link."""
    return path.readlink() if path.is_symlink() else None


def remove(files: Iterable[Planned], *, dry_run: bool) -> Iterator[tuple[Path, Deed]]:
    """Remove installed files, and directories that are empty then.

    Yields:
        As `place`; files that do not exist are skipped.

    Raises:
        InstallError: a file cannot be removed.
    """
    for file in files:
        if isinstance(file, PlannedLink):
            if _target(file.path) == file.target:
                if not dry_run:
                    _unlink(file.path)
                    _remove_empty(file.path.parent, file.top)
                yield file.path, "removed"
            continue
        current = _read(file.path)
        is_changed = file.is_settings and current not in (None, file.text)
        if not dry_run:
            _unlink(_beside(file.path))
            if not is_changed:
                _unlink(file.path)
                _remove_empty(file.path.parent, file.top)
        if current is not None:
            yield file.path, "kept" if is_changed else "removed"


def _beside(path: Path) -> Path:
    return path.with_name(path.name + NEW)


def _read(path: Path) -> str | None:
    """Return the text of a file; None: there is none. Invalid UTF-8 never equals our text."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _install_error("read", path, error) from error


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                os.fchmod(fd, FILE_MODE)
                file.write(text)
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise _install_error("write", path, error) from error


def _unlink(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise _install_error("remove", path, error) from error


def _remove_empty(directory: Path, top: Path) -> None:
    """Remove a directory if it is empty, and its parents below `top` as far as they are."""
    while directory != top:
        try:
            directory.rmdir()
        except OSError:  # not empty, not permitted, or missing
            return
        directory = directory.parent


def _install_error(deed: str, path: Path, error: OSError) -> InstallError:
    remedy = (
        "run it as root, or add --user to install units for your own systemd"
        if isinstance(error, PermissionError)
        else "check that path, and run it again"
    )
    return InstallError(f"cannot {deed} {path} ({error.strerror})", remedy)
