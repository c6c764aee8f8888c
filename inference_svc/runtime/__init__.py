"""What touches the world: torch, the arena, files. Imports `core`, never the service or the server.

Floors, each above what it uses; packages of one floor do not know each other:

    turns                    a turn, from its text to its last token; sessions' transcripts
    engine                   the engine loop: requests, steps, loads and discards under way
    calibration | store      what is found out about a model | sessions' KV in kvd
    compute | transfer       one step of the model | KV to and from the arena, and within memory
    positions                rotary embedding as tables; what loading and storing know of a model
    attention                new tokens attend to working KV
    kv                       working KV: memory, who may touch it when, views of the arena
    memory | model           memory that is kept | a model directory becomes a model

`worker_thread` is used by all that awaits what blocks.
"""
