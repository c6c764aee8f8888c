"""Man pages and docs/*-cli.md, generated from the commands: python -m tests.docs.man_pages.

Run it after any change of a command, an option or a help text; a test compares.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import inference_svc.cli.completion
import inference_svc.cli.main
import kvd.cli.completion
import kvd.cli.main
from tests.docs.command_pages import Entry, Page, pages

ROOT = Path(__file__).parent.parent.parent
MAN = Path("docs/man")


@dataclass(frozen=True)
class Program:
    """The sources of a program's pages.

    Attributes:
        root: its command.
        choices: values of an option, by name.
        exit_codes: each with its meaning.
        files: installed paths, each with its purpose.
        introduction: paragraphs about all of its commands.
    """

    name: str
    root: Any
    examples: Mapping[str, Sequence[str]]
    choices: Mapping[str, Sequence[str]]
    exit_codes: Mapping[int, str]
    files: Sequence[tuple[str, str]]
    introduction: Sequence[str]

    @property
    def markdown(self) -> Path:
        """Return the path of the document about its commands."""
        return Path(f"docs/{self.name}-cli.md")

    def pages(self) -> list[Page]:
        """Return its own page, and each command's."""
        return list(pages(self.root, (self.name,), self.examples, self.choices))


KVD = Program(
    "kvd",
    kvd.cli.main.root_command(),
    kvd.cli.main.EXAMPLES,
    kvd.cli.completion.CHOICES,
    kvd.cli.main.EXIT_CODES,
    (
        ("/etc/kvd/kvd.toml", "settings of the daemon; systemd/kvd.toml explains every key"),
        ("/etc/kvd/remote.env", "credentials of the remote store, for kvd remote follow"),
        ("/run/kvd", "its sockets: engine.sock, operator.sock, reader.sock, data.sock, files.sock"),
        ("/var/lib/kvd", "its index and volumes"),
    ),
    (
        (
            "Commands for a running kvd find it in its runtime "
            "directory (--runtime-dir, or KVD_RUNTIME_DIR), or at --address."
        ),
        (
            "Output is for people: times are rounded, and a narrow terminal shows fewer columns. "
            "With --json a command prints one document that has everything, with a document a line "
            "where it goes on (events --follow, stats --watch)."
        ),
    ),
)
INFERENCE_SVC = Program(
    "inference-svc",
    inference_svc.cli.main.root_command(),
    inference_svc.cli.main.EXAMPLES,
    inference_svc.cli.completion.CHOICES,
    inference_svc.cli.main.EXIT_CODES,
    (
        (
            "/etc/kvd/inference-svc.toml",
            "settings of every service; systemd/inference-svc.toml explains every key",
        ),
        ("/etc/kvd/inference-svc@NAME.env", "what the service of model NAME has for itself"),
        ("/var/lib/models/NAME", "the model that inference-svc@NAME serves"),
        ("/run/inference-svc-NAME/inference.sock", "its socket"),
        ("/var/lib/inference-svc/NAME", "its transcripts"),
        ("~/.local/state/inference-svc/up", "state and logs of `inference-svc up`"),
    ),
    (
        (
            "Commands that call a service (chat, status, top) find this user's own, or the only "
            "one of the system; else --address, or INFERENCE_ADDRESS, says which."
        ),
        (
            "What runs a model (up, serve, demo, bench, eval) needs the extra "
            "cachedattention[engine]; the others do without PyTorch."
        ),
    ),
)
PROGRAMS = (KVD, INFERENCE_SVC)


def all_files() -> dict[Path, str]:
    """Return every generated file, by its path in the repository."""
    files = {}
    for program in PROGRAMS:
        found = program.pages()
        files |= {MAN / f"{page.title}.1": man_page(program, page, found) for page in found}
        files[program.markdown] = "\n".join(_markdown(program, found)) + "\n"
    return files


# --------------------------------------------------------------------------------------------- roff


def man_page(program: Program, page: Page, every: Sequence[Page]) -> str:
    """Return one page, in the macros of man(7)."""
    lines = [f'.TH {page.title.upper()} 1 "" "CachedAttention" "{program.name}"']
    lines += [".SH NAME", f"{_roff(page.title)} \\- {_roff(_lower(page.summary))}"]
    lines += [".SH SYNOPSIS", f".B {_roff(' '.join(page.words))}", _roff(page.usage)]
    lines += [".SH DESCRIPTION", *_paragraphs(page.paragraphs)]
    if len(page.words) == 1:
        lines += _paragraphs(program.introduction, is_first=False)
    for heading, entries in (("ARGUMENTS", page.arguments), ("OPTIONS", page.options)):
        if entries:
            lines += [f".SH {heading}", *_entries(entries)]
    if page.commands:
        lines.append(".SH COMMANDS")
        for name, what in page.commands:
            lines += [".TP", f".B {_roff(name)}", _roff(f"{what}. See {page.title}-{name}(1).")]
    if page.examples:
        lines += [".SH EXAMPLES", ".nf", *(_roff(line) for line in page.examples), ".fi"]
    lines += _ending(program, page, every)
    return "\n".join(lines) + "\n"


def _ending(program: Program, page: Page, every: Sequence[Page]) -> Iterator[str]:
    yield ".SH EXIT STATUS"
    if len(page.words) > 1:
        yield "As listed in"
        yield f".BR {_roff(program.name)} (1)."
        yield from (".SH SEE ALSO", f".BR {_roff(program.name)} (1)")
        return
    for code, meaning in program.exit_codes.items():
        yield from (".TP", f".B {code}", _roff(f"{meaning}."))
    yield ".SH FILES"
    for path, what in program.files:
        yield from (".TP", f".I {_roff(path)}", _roff(f"{what}."))
    yield ".SH SEE ALSO"
    others = [other.title for other in every if other is not page]
    for title in others:
        yield f".BR {_roff(title)} (1){'' if title == others[-1] else ','}"


def _paragraphs(paragraphs: Sequence[str], *, is_first: bool = True) -> Iterator[str]:
    for index, paragraph in enumerate(paragraphs):
        if index or not is_first:
            yield ".PP"
        yield _roff(paragraph)


def _entries(entries: Sequence[Entry]) -> Iterator[str]:
    for entry in entries:
        yield from (".TP", f".B {_roff(entry.name)}")
        yield _roff(" ".join(word for word in (entry.text, entry.facts) if word) or "-")


def _roff(text: str) -> str:
    """Escape text for roff: a backslash, a hyphen and a leading dot have other meanings there."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    text = "".join(char if char.isascii() else f"\\[u{ord(char):04X}]" for char in text)
    return f"\\&{text}" if text.startswith((".", "'")) else text


def _lower(text: str) -> str:
    """Start a sentence in lower case, to follow a dash; names keep their capitals."""
    return text if text[:2].isupper() else text[:1].lower() + text[1:]


# ----------------------------------------------------------------------------------------- Markdown


def _markdown(program: Program, every: Sequence[Page]) -> Iterator[str]:
    first, *others = every
    yield f"# The {program.name} command"
    yield from ("", "<!-- Made by `python -m tests.docs.man_pages` from the commands. -->")
    for paragraph in (*first.paragraphs, *program.introduction):
        yield from ("", paragraph)
    yield from ("", "| command | what it does |", "|---|---|")
    for page in others:
        if not page.commands:
            name = " ".join(page.words)
            yield f"| [`{name}`](#{page.title}) | {_cell(page.summary)} |"
    yield from ("", "Before the command's name:", "", *_table(first.options, "option"))
    yield from ("", "## Exit codes", "", "| code | meaning |", "|---|---|")
    for code, meaning in program.exit_codes.items():
        yield f"| {code} | {_cell(meaning)} |"
    for page in others:
        if not page.commands:
            yield from _section(page)


def _section(page: Page) -> Iterator[str]:
    name = " ".join(page.words)
    yield from ("", f'<a id="{page.title}"></a>', "", f"## {name}")
    yield from ("", f"`{name} {page.usage}`" if page.usage else f"`{name}`")
    for paragraph in page.paragraphs:
        yield from ("", paragraph)
    if page.arguments:
        yield from ("", *_table(page.arguments, "argument"))
    if page.options:
        yield from ("", *_table(page.options, "option"))
    if page.examples:
        yield from ("", "```sh", *page.examples, "```")


def _table(entries: Sequence[Entry], what: str) -> Iterator[str]:
    yield from (f"| {what} | |", "|---|---|")
    for entry in entries:
        text = " ".join(word for word in (entry.text, entry.facts) if word)
        yield f"| `{_cell(entry.name)}` | {_cell(text)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> None:
    """Write every file, and remove pages of removed commands."""
    files = all_files()
    for old in (ROOT / MAN).glob("*.1"):
        if MAN / old.name not in files:
            old.unlink()
    for path, text in files.items():
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / path).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
