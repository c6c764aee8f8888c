"""Options of connection may come before or after the command."""

import pytest

from inference_svc.cli import main as inference_cli
from inference_svc.cli.connection import MOVABLE as INFERENCE_MOVABLE
from kvd.cli.main import main as kvd
from kvd.cli.main import root_command
from kvd.client.connection import MOVABLE
from shared.config.command_line import arrange_options
from shared.version import __version__


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("--runtime-dir run ls --json", "ls --runtime-dir run --json"),
        ("ls --json --runtime-dir run", "ls --runtime-dir run --json"),
        ("--runtime-dir=run ls", "ls --runtime-dir=run"),
        ("--runtime-dir run config show --running", "config show --runtime-dir run --running"),
        ("ls --address h:1 --tenant a", "--address h:1 ls --tenant a"),
        ("ls a --token-file=f --address h:1", "--token-file=f --address h:1 ls a"),
        ("--address h:1 --runtime-dir run ls", "--address h:1 ls --runtime-dir run"),
        ("ls --runtime-dir a --runtime-dir b", "ls --runtime-dir a --runtime-dir b"),
        ("ls --tenant --address x", "ls --tenant --address x"),  # the tenant's name is --address
        ("ls -- --address", "ls -- --address"),
        ("--runtime-dir run complete -- ls --address h:1", None),
        ("ls --sort show --runtime-dir run", "ls --runtime-dir run --sort show"),
        ("token show --runtime-dir run", None),  # it has none: the library reports it
        ("--runtime-dir run", "--runtime-dir run"),
        ("ls --runtime-dir", "ls --runtime-dir"),
        ("--help", "--help"),
        ("", ""),
    ],
)
def test_each_option_is_moved_to_where_it_is_known(typed, expected):
    """In their order; values of other options are no commands."""
    found = arrange_options(root_command(), typed.split(), MOVABLE)
    if expected is None:
        assert sorted(found) == sorted(typed.split())
    else:
        assert found == expected.split()


@pytest.mark.parametrize("main", [kvd, inference_cli.main], ids=["kvd", "inference-svc"])
@pytest.mark.parametrize("asked", ["--version", "version"])
def test_both_programs_print_their_version(main, asked, capsys):
    """As an option and as a command."""
    with pytest.raises(SystemExit) as ended:
        main([asked])
    assert ended.value.code in (0, None)
    assert capsys.readouterr().out == f"{__version__}\n"


@pytest.mark.parametrize(
    ("main", "words", "said"),
    [
        (kvd, ["show", "a\udcff"], "kvd: the argument 'a\\udcff' is not UTF-8: "),
        (kvd, ["ls", "--tenant", "\udcff"], "kvd: the argument '\\udcff' is not UTF-8: "),
        (inference_cli.main, ["why", "\udcff"], "inference-svc: the argument '\\udcff' is "),
    ],
)
def test_arguments_that_are_not_utf8_are_bad_usage(main, words, said, capsys):
    """Python passes their bytes on as surrogates, which no peer could be sent."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(said)


@pytest.mark.parametrize(
    ("main", "group"),
    [(kvd, []), (kvd, ["config"]), (inference_cli.main, []), (inference_cli.main, ["bench"])],
    ids=["kvd", "kvd-config", "inference-svc", "inference-svc-bench"],
)
def test_a_groups_help_is_complete(main, group, capsys, monkeypatch):
    """At 80 columns each command has its whole sentence, without frames."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([*group, "--help"])
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    assert not {"…", "│"} & set(said)
    assert "..." not in said.replace("[ARGS]...", "")
    assert said.count(":\n") >= (2 if group else 5)  # options, and headings


def test_the_services_address_too():
    """It is an option of the commands, and may come before them."""
    root = inference_cli.typer.main.get_command(inference_cli.app)
    found = arrange_options(root, ["--address", "unix:/s", "status", "--json"], INFERENCE_MOVABLE)
    assert found == ["status", "--address", "unix:/s", "--json"]
