"""The commands of `inference-svc`, in the order of its help: where each is, and what it does."""

from collections.abc import Mapping

from shared.lazy_commands import LazyCommand

COMMANDS: Mapping[str, LazyCommand] = {
    "serve": LazyCommand("inference_svc.cli:serve", "Serve a model until SIGTERM"),
    "chat": LazyCommand(
        "inference_svc.cli:chat", "Talk to a running service; each answer shows what was reused"
    ),
    "status": LazyCommand(
        "inference_svc.cli:status",
        "Say what a running service serves; exit code 69 if nobody answers",
    ),
    "demo": LazyCommand(
        "inference_svc.demo.cli:demo",
        "Replay real conversations through kvd and the service, checked against recomputation",
    ),
    "token": LazyCommand(
        "inference_svc.cli_connection:token",
        "Make a token for a client, and say what the settings need of it",
    ),
    "config": LazyCommand("inference_svc.cli:config_app", "Look at the settings"),
    "bench": LazyCommand(
        "inference_svc.bench.cli:bench_app",
        "Measure the engine in this process, with a kvd of the bench's own",
    ),
    "eval": LazyCommand(
        "inference_svc.eval.cli:eval_app",
        "Measure what truncating a context costs in quality, by ways to truncate",
    ),
}
