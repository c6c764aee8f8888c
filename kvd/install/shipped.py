"""The files of systemd/: in the package of an installed kvd, beside it in a working tree."""

import sys
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import kvd
from kvd.errors import InstallError
from kvd.install.units import SHIPPED

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

PACKAGED = "units"  # where pyproject.toml has the wheel put them


def read_shipped() -> dict[str, str]:
    """Name → text, of all SHIPPED.

    Raises:
        InstallError: this installation has none.
    """
    tree = Path(kvd.__file__).resolve().parents[1] / "systemd"
    places: tuple[Traversable, ...] = (resources.files(kvd) / PACKAGED, tree)
    for place in places:
        if (place / SHIPPED[0]).is_file():
            return {name: (place / name).read_text(encoding="utf-8") for name in SHIPPED}
    raise InstallError("this installation has no units", "install kvd from its wheel")


def man_pages() -> list[Path]:
    """Those of this installation; of a working tree the tree's."""
    tree = Path(kvd.__file__).resolve().parents[1] / "docs" / "man"
    for place in (Path(sys.prefix) / "share" / "man" / "man1", tree):
        if found := sorted(place.glob("kvd*.1")):
            return found
    return []
