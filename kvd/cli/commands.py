"""The commands of `kvd`, in the order of its help: where each is, and what it does."""

from collections.abc import Mapping

from shared.config.lazy_commands import LazyCommand

# Headings of its list of commands.
SESSIONS = "Sessions"
LOOKING = "What goes on"
DAEMON = "The daemon"
PLANNING = "Sizes and speeds"
SETUP = "Setting up"

COMMANDS: Mapping[str, LazyCommand] = {
    "serve": LazyCommand(
        "kvd.cli.main:serve",
        "Run the daemon until SIGTERM (DRAM is kept for the next start) or SIGINT (it is not)",
        heading=DAEMON,
    ),
    "ls": LazyCommand("kvd.cli.sessions:list_sessions", "List stored sessions", heading=SESSIONS),
    "show": LazyCommand(
        "kvd.cli.sessions:show",
        "Show one session: its facts, leases, blocks, and what happened to it lately",
        heading=SESSIONS,
    ),
    "flush": LazyCommand(
        "kvd.cli.sessions:flush",
        "Drop the KV of one session, of those that fit, or of all, from every tier",
        heading=SESSIONS,
    ),
    "pin": LazyCommand(
        "kvd.cli.sessions:pin", "Protect a session from eviction and expiry", heading=SESSIONS
    ),
    "unpin": LazyCommand("kvd.cli.sessions:unpin", "Take the protection away", heading=SESSIONS),
    "ttl": LazyCommand(
        "kvd.cli.sessions:ttl",
        "Set how long a session is kept after its last use",
        heading=SESSIONS,
    ),
    "stats": LazyCommand(
        "kvd.cli.tiers:stats",
        "Show how full the tiers are, who is attached, and what was counted",
        heading=LOOKING,
    ),
    "events": LazyCommand(
        "kvd.cli.events:events",
        "Show what happened lately, oldest first; with --follow also what happens",
        heading=LOOKING,
    ),
    "top": LazyCommand(
        "kvd.cli.top:top",
        "Watch tiers, hit rates, queues, engines and sessions, live",
        heading=LOOKING,
    ),
    "leases": LazyCommand(
        "kvd.cli.tiers:leases",
        "List who uses slots, oldest first; or end a process that hangs on to some",
        heading=LOOKING,
    ),
    "verify": LazyCommand(
        "kvd.cli.tiers:verify",
        "Compare every stored block with its checksums, at integrity.scrub_rate",
        heading=DAEMON,
    ),
    "reopen": LazyCommand(
        "kvd.cli.tiers:reopen",
        "Open a layout that was unavailable, or decide what becomes of it",
        heading=DAEMON,
    ),
    "export": LazyCommand(
        "kvd.cli.session_files:export_session",
        "Write a session's tokens and KV to a file, which kvd import takes in elsewhere",
        heading=SESSIONS,
    ),
    "import": LazyCommand(
        "kvd.cli.session_files:import_session",
        "Store a session from a file that kvd export has written; damaged ones are refused",
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
        "Look for what stands in kvd's way on this machine, and say how to mend it",
        heading=DAEMON,
    ),
    "install-units": LazyCommand(
        "kvd.cli.install:install_units",
        "Put units, users and settings where systemd looks for them; settings of yours are kept",
        heading=SETUP,
    ),
    "token": LazyCommand(
        "kvd.cli.token:token",
        "Make a token for a client, and say what the settings need of it",
        heading=SETUP,
    ),
    "completion": LazyCommand(
        "kvd.cli.completion:completion",
        "Print a script for Tab: a shell then completes commands, options, stored sessions",
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
