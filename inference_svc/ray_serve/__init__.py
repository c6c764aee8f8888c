"""Ray Serve in front of several servers: replicas that forward turns, and their router.

    reports           reports of a replica's service to the routers, as plain values; pure
    forwarding        headers and metadata that are forwarded; pure
    local_service     the service of this machine: its state, and calls to it
    session_server    the deployment: each replica forwards calls to one service
    replica_router    in Ray's routers: chooses the replica of a call, with `shared.routing`
    proxies           in Ray's proxies: unchanged gRPC errors, and the headers of agents
    other_replicas    the other replicas, for requests that this one's service refuses
    app               the application that `serve run` and `serve deploy` start

It needs the extra `ray`, and no other package imports it. docs/scaling.md has the set-up.
"""
