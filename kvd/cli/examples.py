"""Examples of each command, for its help, its man page and the docs."""

from collections.abc import Mapping

import typer

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


def add_examples(app: typer.Typer, prefix: str = "") -> None:
    """Put the examples under the help of an app's commands."""
    for command in app.registered_commands:
        lines = EXAMPLES.get(f"{prefix}{command.name}", ())
        block = "\n".join(("\b", "Examples:", *(f"  {line}" for line in lines)))
        command.epilog = block if lines else None
    for group in app.registered_groups:
        if group.typer_instance is not None:
            add_examples(group.typer_instance, f"{prefix}{group.name} ")
