"""The Ray Serve application: `import_path: inference_svc.ray_serve.app:build`, or `server.bind()`.

examples/ray has a config, which docs/scaling.md explains. Any option of the deployment can be
overridden there, or with `server.options(...)`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig

from inference_svc.ray_serve.session_server import MOST_SESSIONS, WAIT_S, SessionServer

# Above the service's own bound of turns, so that the service refuses turns, and not Ray.
MAX_ONGOING_REQUESTS = 4096
STATS_PERIOD_S = 1.0
STATS_TIMEOUT_S = 10.0
SHUTDOWN_S = 600.0  # as long as clients wait for a turn: a replica ends after its turns

server = serve.deployment(
    SessionServer,
    name="SessionServer",
    max_ongoing_requests=MAX_ONGOING_REQUESTS,
    ray_actor_options={"num_cpus": 0},  # the service computes, not its replica
    graceful_shutdown_timeout_s=SHUTDOWN_S,
    request_router_config=RequestRouterConfig(
        request_router_class="inference_svc.ray_serve.replica_router.SessionReplicaRouter",
        request_routing_stats_period_s=STATS_PERIOD_S,
        request_routing_stats_timeout_s=STATS_TIMEOUT_S,
    ),
)


def build(args: Mapping[str, Any]) -> serve.Application:
    """Build the application.

    Args:
        args: the config's arguments, by the names of `SessionServer`'s parameters; all except
            `services` have defaults.
    """
    services: Sequence[Mapping[str, str]] = args["services"]
    application: serve.Application = server.bind(
        services,
        int(args.get("most_sessions", MOST_SESSIONS)),
        float(args.get("wait_s", WAIT_S)),
    )
    return application
