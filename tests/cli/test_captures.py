"""Commands print the output in tests/cli/golden."""

import pytest

from inference_svc.cli.main import main as inference_svc
from shared.process.runtime_dir import OPERATOR_SOCKET
from tests.cli.captures import (
    CAPTURES,
    COMMANDS,
    GOLDEN,
    KINDS,
    OF_ANY_WIDTH,
    SHOW_A_LOG,
    capture,
    capture_directory,
    commands,
    golden_path,
)
from tests.terminal import on_terminal


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Return the directory of daemons with fixed answers."""
    with capture_directory(tmp_path_factory.mktemp("fixed")) as made:
        yield made


@pytest.mark.parametrize(("name", "kind"), CAPTURES)
def test_a_commands_output_is_the_recorded_one(name, kind, directory):
    """To change it, run python -m tests.cli.captures, and check the difference."""
    expected = golden_path(name, kind).read_text(encoding="utf-8")
    assert capture(name, kind, directory) == expected


def test_a_service_is_watched_on_a_terminal(directory):
    """Until q: the status, and a line for each rate."""
    at = f"unix:{directory / OPERATOR_SOCKET}"
    with on_terminal("top", "--address", at, module="inference_svc.cli.main") as terminal:
        terminal.until("smollm2-135m", "tokens/s", "q quits")
        terminal.type("q")
        assert terminal.exit_code() == 0
        assert terminal.echoes()


def test_a_service_cannot_be_watched_in_a_pipe(directory, capsys):
    """Nobody could press q."""
    with pytest.raises(SystemExit) as ended:
        inference_svc(["top", "--address", f"unix:{directory / OPERATOR_SOCKET}"])
    assert ended.value.code == 2
    assert "status --json" in capsys.readouterr().err


def test_each_command_has_a_capture():
    """Besides its help: its own, or one of its group."""
    shown = [name for name in COMMANDS if not name.endswith("-help")]
    for words, command in commands():
        if hasattr(command, "commands"):
            continue
        name, group = "-".join(words), "-".join(words[:-1])
        has_own = any(f"{each}-".startswith(f"{name}-") for each in shown)
        assert has_own or group in shown or name in SHOW_A_LOG, name


def test_each_capture_belongs_to_a_command():
    """Each command's help has one; no capture is unused."""
    assert set(GOLDEN.iterdir()) == {golden_path(name, kind) for name, kind in CAPTURES}


@pytest.mark.parametrize(("name", "kind"), CAPTURES)
def test_only_a_terminal_limits_the_width(name, kind):
    """In a pipe nothing is cut off; on a terminal no line is longer than its width."""
    text = golden_path(name, kind).read_text(encoding="utf-8")
    width = KINDS[kind]
    if width is None:
        assert "…" not in text
    elif not name.endswith(OF_ANY_WIDTH):
        assert max(map(len, text.splitlines())) <= width
