"""Options of a command as fields of dataclasses."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from shared.measuring.options import TEXT, command, numbers, one_of, some_of
from shared.types.errors import InvalidInputError


@dataclass(frozen=True)
class Choice:
    """The choice of measurements."""

    path: Annotated[Path | None, typer.Option("--model", help="Which one.")] = None
    kind: Annotated[str, typer.Option(parser=one_of("kind", "a", "b"), metavar=TEXT)] = "a"
    seed: int = 7


@dataclass(frozen=True)
class Sizes:
    """The sizes of measurements."""

    batches: Annotated[tuple[int, ...], typer.Option(parser=numbers, metavar=TEXT)] = (1, 8)
    splits: Annotated[
        tuple[tuple[int, int], ...], typer.Option(parser=lambda text: text, metavar=TEXT)
    ] = ((9, 1), (5, 5))
    is_quick: Annotated[bool, typer.Option("--quick")] = False


def _run(*words, **how):
    found = []
    app = typer.Typer(rich_markup_mode=None)

    @app.command()
    @command(Choice, Sizes, **how)
    def measure(choice: Choice, sizes: Sizes) -> None:
        """Run the measurement."""
        found.extend((choice, sizes))

    result = CliRunner().invoke(app, words)
    return found, result


def test_a_command_gets_the_defaults():
    """Lists are parsed from the text that help shows.

    Fields that are no options keep their values.
    """
    found, _ = _run()
    assert found == [Choice(), Sizes(splits="9/1,5/5")]
    assert found[0].seed == 7


def test_a_command_gets_the_given_values():
    """Under the names that the options have."""
    found, _ = _run("--model", "x", "--kind", "b", "--batches", "3,4", "--quick")
    assert found[0] == Choice(Path("x"), "b")
    assert (found[1].batches, found[1].is_quick) == ((3, 4), True)


def test_an_order_selects_the_options():
    """Help has them in that order, and no others."""
    _, shown = _run("--help", order="is_quick batches")
    assert shown.output.index("--quick") < shown.output.index("--batches")
    assert "--model" not in shown.output
    assert "Run the measurement." in shown.output


def test_unknown_options_are_refused_with_the_known_ones():
    """In the words of errors."""
    _, result = _run("--kind", "c")
    assert isinstance(result.exception, InvalidInputError)
    assert "no such kind: c" in str(result.exception)
    with pytest.raises(InvalidInputError, match="no such variants: ca,x"):
        some_of("variants", "ca", "re")("ca,x")
    assert some_of("variants", "ca", "re")("re,ca") == ("re", "ca")
