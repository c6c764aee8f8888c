"""What touches the world: torch, the arena, files. Imports `core`, never the service.

Floors, each above what it uses; packages of one floor do not know each other:

    turns                    a turn, from its text to its last token; sessions' transcripts
    engine                   the engine loop: requests, steps, loads and discards under way
    calibration | store      what is found out about a model | sessions' KV in kvd
    compute                  one step of the model
    model | transfer         a model directory becomes a model | KV to and from the arena
    positions                rotary embedding as tables; what loading and storing know of a model
    attention                new tokens attend to working KV
    kv                       working KV: memory, who may touch it when, views of the arena
    memory | worker_thread   memory that is used again | threads for calls that block
"""
