"""Parser of docs/clients.md: its sections and code blocks, as a reader types them."""

import re
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
WRITTEN = "127.0.0.1:8000"  # the page's address, replaced with the pair's
MODEL = "smollm2"  # the page's name of the model
_HEADING = re.compile(r"^## (\S.*?)(?: \((.*)\))?$", re.MULTILINE)
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Section:
    """The page's section about a client.

    Attributes:

    versions: those in its heading.

    blocks: (language, text) each, in the page's order.
    """

    name: str
    versions: str
    blocks: tuple[tuple[str, str], ...]

    def block(self, language: str, number: int = 0) -> str:
        """Return a block of a language, by its place among those of that language."""
        return [text for written, text in self.blocks if written == language][number]

    def at(self, address: str) -> "Section":
        """Return the same section for a service at another address."""
        blocks = tuple((lang, text.replace(WRITTEN, address)) for lang, text in self.blocks)
        return Section(self.name, self.versions, blocks)


def sections() -> dict[str, Section]:
    """Return the sections of the page by the names of their clients."""
    _, *parts = _HEADING.split(PAGE.read_text(encoding="utf-8"))
    return {
        name: Section(name, versions or "", tuple(_BLOCK.findall(text)))
        for name, versions, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True)
    }


def commands(block: str) -> tuple[str, list[str]]:
    """Split a shell block into the lines that set its environment, and the commands after."""
    lines = block.strip().splitlines()
    setting = [line for line in lines if line.startswith("export ")]
    return "\n".join(setting), [line for line in lines if line not in setting]
