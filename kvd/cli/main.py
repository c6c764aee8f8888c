"""The `kvd` command: its commands as data, in the order of its help, and its entry point.

The tables have modules, help, examples and exit codes. Help, man pages, docs and shell completion
are made from them.
"""

import atexit
import gc
import sys
from collections.abc import Mapping
from typing import Any

import typer

from kvd.client.connection import MOVABLE, connection_options
from kvd.errors import BrokenError
from shared.config.command_line import arrange_options
from shared.config.lazy_commands import LazyCommand, examples_adder, exit_codes_help, lazy_group
from shared.types.errors import ReportedError
from shared.version import __version__

EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "serve": (
        "kvd serve --dram 8GB --ssd 100GB",
        "kvd serve --config /etc/kvd/kvd.toml",
    ),
    "ls": (
        "kvd ls --sort bytes --limit 20",
        "kvd ls conversation- --tenant acme --idle 1h",
        "kvd ls --tier dram --larger-than 1GB --json",
    ),
    "show": ("kvd show conversation-17", "kvd show conversation-17 --tenant acme --json"),
    "why": ("kvd why conversation-17", "kvd why conversation-17 --json"),
    "flush": (
        "kvd flush conversation-17",
        "kvd flush --tenant acme --idle 7d --dry-run",
        "kvd flush --ended --yes",
        "kvd flush --secure --tenant acme",
    ),
    "pin": ("kvd pin conversation-17", "kvd pin conversation-17 --soft"),
    "unpin": ("kvd unpin conversation-17",),
    "ttl": ("kvd ttl conversation-17 2h", "kvd ttl conversation-17 never"),
    "stats": ("kvd stats", "kvd stats --watch --interval 5s", "kvd stats --watch --json"),
    "token": ("kvd token monitoring --file monitoring.token", "kvd token monitoring --json"),
    "events": (
        "kvd events --last 100",
        "kvd events --follow --name session_cut --name block_corrupt",
        "kvd events --follow --tenant acme --json",
    ),
    "top": ("kvd top", "kvd top --sort bytes --tenant acme", "kvd top --json --interval 1s"),
    "leases": ("kvd leases", "kvd leases --kill 4711"),
    "verify": ("kvd verify", "kvd verify --repair"),
    "reopen": (
        "kvd reopen 43eaf0d620c7",
        "kvd reopen 43eaf0d620c7 --accept-loss",
        "kvd reopen 43eaf0d620c7 --set-aside",
    ),
    "export": (
        "kvd export conversation-17 conversation-17.kvd",
        "kvd export conversation-17 backup.kvd --tenant acme --force",
    ),
    "import": (
        "kvd import conversation-17.kvd",
        "kvd import backup.kvd --tenant acme --session conversation-18",
        "kvd import conversation-17.kvd --replace",
    ),
    "push": (
        "kvd push --all --to s3://sessions/prod",
        "kvd push conversation-17 --to file:///mnt/sessions --rate 200MB",
    ),
    "pull": (
        "kvd pull conversation-17 --from s3://sessions/prod",
        "kvd pull conversation-17 --tenant acme --copy",
    ),
    "remote ls": ("kvd remote ls s3://sessions/prod --tenant acme",),
    "remote rm": (
        "kvd remote rm s3://sessions/prod --session conversation-17",
        "kvd remote rm s3://sessions/prod --tenant acme --yes",
    ),
    "remote follow": ("kvd remote follow", "kvd remote follow --runtime-dir /run/kvd"),
    "remote status": ("kvd remote status", "kvd remote status --json"),
    "remote sweep": ("kvd remote sweep s3://sessions/prod",),
    "doctor": ("kvd doctor", "kvd doctor --config /etc/kvd/kvd.toml --quiet"),
    "plan": (
        "kvd plan --observe",
        "kvd plan --trace trace.jsonl --dram 128GB,256GB --ssd 10TB",
        "kvd plan --generate sharegpt-like --capacity-share 5%,20%",
    ),
    "bench": ("kvd bench --quick",),
    "install-units": (
        "kvd install-units --dry-run",
        "sudo /opt/cachedattention/bin/kvd install-units",
        "kvd install-units --user",
    ),
    "config show": ("kvd config show", "kvd config show --running"),
    "config check": ("kvd config check --config /etc/kvd/kvd.toml",),
    "config reload": ("kvd config reload",),
    "key new": ("kvd key new /etc/credstore/kvd-key",),
    "key rotate": ("kvd key rotate /etc/credstore/kvd-key.new --old /etc/credstore/kvd-key",),
    "completion": ("source <(kvd completion bash)",),
}


EXIT_BROKEN = 70  # EX_SOFTWARE
EXIT_CODES: Mapping[int, str] = {
    0: "done",
    1: "a problem was found: corrupt copies that verify could not repair, findings of doctor; or "
    "the command failed",
    2: "bad usage or value, or a question not answered with yes",
    3: "unknown session or model, or a process that holds no lease",
    4: "in use: by an engine, or owned by another server",
    5: "not possible in the current state",
    6: "a limit is reached: another verify runs, or there are too many watchers",
    7: "not allowed: missing or wrong token or certificate, role or tenant",
    8: "deadline exceeded",
    69: "kvd is not running, or does not answer",
    70: "kvd stopped because of a bug",
    78: "the settings are invalid, or the start was refused",
    130: "interrupted with Ctrl-C",
}

# Headings of the help's list of commands.
SESSIONS = "Sessions"
LOOKING = "Monitoring"
DAEMON = "The daemon"
PLANNING = "Sizes and speeds"
SETUP = "Setting up"

COMMANDS: Mapping[str, LazyCommand] = {
    "serve": LazyCommand(
        "kvd.cli.serve:serve",
        "Run the daemon until SIGTERM (DRAM is kept for the next start) or SIGINT (it is not)",
        heading=DAEMON,
    ),
    "ls": LazyCommand("kvd.cli.sessions:list_sessions", "List stored sessions", heading=SESSIONS),
    "show": LazyCommand(
        "kvd.cli.sessions:show",
        "Show one session: properties, leases, blocks and recent history",
        heading=SESSIONS,
    ),
    "why": LazyCommand(
        "kvd.cli.sessions:why",
        "Explain why KV of a session was missed, and what would keep it",
        heading=SESSIONS,
    ),
    "flush": LazyCommand(
        "kvd.cli.sessions:flush",
        "Drop the KV of one session, of matching ones, or of all, from every tier",
        heading=SESSIONS,
    ),
    "pin": LazyCommand(
        "kvd.cli.sessions:pin", "Protect a session from eviction and expiry", heading=SESSIONS
    ),
    "unpin": LazyCommand("kvd.cli.sessions:unpin", "Remove a session's pin", heading=SESSIONS),
    "ttl": LazyCommand(
        "kvd.cli.sessions:ttl",
        "Set how long a session is kept after its last use",
        heading=SESSIONS,
    ),
    "stats": LazyCommand(
        "kvd.cli.tiers:stats",
        "Show tiers, engines, tenants and counters",
        heading=LOOKING,
    ),
    "events": LazyCommand(
        "kvd.cli.events:events",
        "Show recent events, oldest first; with --follow also new ones",
        heading=LOOKING,
    ),
    "top": LazyCommand(
        "kvd.cli.top:top",
        "Watch tiers, hit rates, queues, engines and sessions, live",
        heading=LOOKING,
    ),
    "leases": LazyCommand(
        "kvd.cli.tiers:leases",
        "List leases, oldest first; or kill a process that holds some",
        heading=LOOKING,
    ),
    "verify": LazyCommand(
        "kvd.cli.tiers:verify",
        "Compare every stored block with its checksums, at integrity.scrub_rate",
        heading=DAEMON,
    ),
    "reopen": LazyCommand(
        "kvd.cli.tiers:reopen",
        "Open an unavailable layout, or decide what to do with it",
        heading=DAEMON,
    ),
    "export": LazyCommand(
        "kvd.cli.session_files:export_session",
        "Write a session's tokens and KV to a file for kvd import",
        heading=SESSIONS,
    ),
    "import": LazyCommand(
        "kvd.cli.session_files:import_session",
        "Store a session from a file of kvd export; damaged files are refused",
        heading=SESSIONS,
    ),
    "push": LazyCommand(
        "kvd.cli.moving:push",
        "Store sessions in an object store, for other kvds to pull",
        heading=SESSIONS,
    ),
    "pull": LazyCommand(
        "kvd.cli.moving:pull",
        "Fetch sessions from an object store, and become their owner",
        heading=SESSIONS,
    ),
    "remote": LazyCommand(
        "kvd.cli.remote:remote_app",
        "List, remove and sweep sessions in an object store; move sessions automatically",
        heading=SESSIONS,
    ),
    "plan": LazyCommand(
        "kvd.cli.plan:plan",
        "Replay a trace: hits, times and cost by policy and capacity",
        heading=PLANNING,
    ),
    "bench": LazyCommand(
        "kvd.cli.bench:bench",
        "Measure arena, SSD, encryption, control plane, queue and restart, against a floor each",
        heading=PLANNING,
    ),
    "doctor": LazyCommand(
        "kvd.cli.doctor:doctor",
        "Examine this machine for problems, with a remedy for each",
        heading=DAEMON,
    ),
    "install-units": LazyCommand(
        "kvd.cli.install:install_units",
        "Install units, users and settings for systemd; your own settings are kept",
        heading=SETUP,
    ),
    "token": LazyCommand(
        "kvd.cli.token:token",
        "Make a token for a client, and print its digest for the settings",
        heading=SETUP,
    ),
    "completion": LazyCommand(
        "kvd.cli.completion:completion",
        "Print a completion script: Tab then completes commands, options, sessions",
        heading=SETUP,
    ),
    "complete": LazyCommand(
        "kvd.cli.completion:complete",
        "Print what the last word may become: a line each, with what it means behind a tab",
        hidden=True,
    ),
    "version": LazyCommand("kvd.cli.main:version", "Print the version", heading=SETUP),
    "config": LazyCommand(
        "kvd.cli.config:config_app", "Show, check or reload the settings", heading=DAEMON
    ),
    "key": LazyCommand(
        "kvd.cli.keys:key_app", "Make and change the key that encrypts SSD", heading=DAEMON
    ),
}

app = typer.Typer(
    name="kvd",
    cls=lazy_group(COMMANDS, examples_adder(EXAMPLES)),
    help="KV-cache daemon: keeps the keys and values of conversations in DRAM and on SSD.\n\n"
    "--runtime-dir, and --address with what belongs to it, may stand before or after the command.",
    epilog=exit_codes_help(EXIT_CODES),
    rich_markup_mode=None,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def version() -> None:
    """Print the version."""
    typer.echo(__version__)


app.callback()(connection_options)


def root_command() -> Any:
    """Return the tree of all commands, for completion and man pages."""
    return typer.main.get_command(app)


def main(arguments: list[str] | None = None) -> None:
    """Run the command; errors become one line on stderr and their exit code.

    Args:
        arguments: the arguments of the command; None: those of the process.

    Raises:
        SystemExit: always.
    """
    if arguments is None:
        # A last search for garbage cycles would only delay the end of the process.
        atexit.register(gc.freeze)
    try:
        root = root_command()
        root(
            arrange_options(root, sys.argv[1:] if arguments is None else arguments, MOVABLE),
            prog_name="kvd",
        )
    except ReportedError as error:
        typer.echo(f"kvd: {error}", err=True)
        sys.exit(error.exit_code)
    except BrokenError as error:
        typer.echo(f"kvd: a bug stopped the daemon ({error}): see the log, and report it", err=True)
        sys.exit(EXIT_BROKEN)
