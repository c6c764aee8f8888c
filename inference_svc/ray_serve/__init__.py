"""Ray Serve in front of several servers: replicas that pass turns on, and their router.

    reports           what a replica tells routers of its service, as plain values; pure
    passing           what of a call goes on to the service; pure
    local_service     the service of this machine: asked how it is, and given what it is to answer
    session_server    the deployment: each of its replicas stands before one service
    replica_router    in Ray's routers: `shared.routing` says which replica gets a call
    proxies           in Ray's proxies: errors of gRPC as they are, and the headers of agents
    app               what `serve run` and `serve deploy` start

Needs the extra `ray`, and nothing else of ours imports it. docs/scaling.md says how it is set up.
"""
