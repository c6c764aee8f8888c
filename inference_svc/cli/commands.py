"""The commands of `inference-svc`, in the order of its help: where each is, and what it does."""

from collections.abc import Mapping

from shared.config.lazy_commands import LazyCommand

# Headings of its list of commands.
SERVING = "The service"
CLIENTS = "What goes on, and talking to it"
MEASURING = "Showing and measuring"
SETUP = "Setting up"

COMMANDS: Mapping[str, LazyCommand] = {
    "serve": LazyCommand(
        "inference_svc.cli.serve:serve", "Serve a model until SIGTERM", heading=SERVING
    ),
    "chat": LazyCommand(
        "inference_svc.cli.chat:chat",
        "Talk to a running service; each answer shows what was reused",
        heading=CLIENTS,
    ),
    "status": LazyCommand(
        "inference_svc.cli.status:status",
        "Say what a running service serves, and how it goes; exit code 69 if nobody answers",
        heading=CLIENTS,
    ),
    "top": LazyCommand(
        "inference_svc.cli.top:top",
        "Watch a running service: tokens a second, hit rate, first tokens, turns; live",
        heading=CLIENTS,
    ),
    "demo": LazyCommand(
        "inference_svc.demo.cli:demo",
        "Replay real conversations through kvd and the service, checked against recomputation",
        heading=MEASURING,
    ),
    "token": LazyCommand(
        "inference_svc.cli.connection:token",
        "Make a token for a client, and say what the settings need of it",
        heading=SETUP,
    ),
    "config": LazyCommand(
        "inference_svc.cli.serve:config_app", "Look at the settings", heading=SERVING
    ),
    "bench": LazyCommand(
        "inference_svc.bench.cli:bench_app",
        "Measure the engine in this process, with a kvd of the bench's own",
        heading=MEASURING,
    ),
    "eval": LazyCommand(
        "inference_svc.eval.cli:eval_app",
        "Measure what truncating a context costs in quality, by ways to truncate",
        heading=MEASURING,
    ),
    "version": LazyCommand("inference_svc.cli.main:version", "Print the version", heading=SETUP),
}
