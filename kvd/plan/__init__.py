"""kvd plan: how much DRAM and SSD do I need? Virtual time over a trace and a model of the machine.

    trace, hardware  ->  replay  ->  outcome
    replay  =  sessions in a closed loop, a routing, servers, and the sessions moving between them
    options, arguments  ->  planning  ->  sweep (many replays)  ->  report, page, plots

`replay` drives the same `kvd.core` code as the daemon (SessionPlacement with its queue, windows and
policies, TtlClock), over byte counts: the code that is planned with is the code that ships (D1). No
file is read but the trace, no clock is read, and all randomness is seeded: the same inputs give the
same outcome.

Sessions come from workload.py, which reads trace.py's format and those of formats/, or from
generate.py and agents.py. The machine comes from hardware.py and model_choice.py. prices.py and
figures.py evaluate outcomes.

Start reading with replay.py (the loop) and server.py (one server). Then: gpu.py, reading.py and
tiers.py, which a server advances, and outcome.py, the measurements. For several servers: fleet.py
(how many, and when they are away), routing.py (which one gets a turn), moving.py (what they hand
on).
"""
