"""kvd plan: how much DRAM and SSD do I need? Virtual time over a trace and a model of the machine.

    trace, hardware  ->  replay  ->  outcome
    replay  =  sessions in a closed loop, a routing, servers, and what moves between them
    options, arguments  ->  planning  ->  sweep (many replays)  ->  report, page, plots

`replay` drives the same `kvd.core` code as the daemon (SessionPlacement with its queue, windows and
policies, TtlClock), over byte counts: what is planned is what ships (D1). No file is read but the
trace, no clock is looked at, nothing is drawn but by a seed: the same inputs give the same outcome.

Sessions come from workload.py, which reads trace.py's form and those of formats/, or from
generate.py; the machine from hardware.py and model_choice.py; prices.py and figures.py say what an
outcome is worth.

Where to begin reading: replay.py (the loop) and server.py (one server), then gpu.py, reading.py and
tiers.py, which are what it advances, and outcome.py, what it measures. Of several servers fleet.py
says how many and when they are away, routing.py who gets a turn, moving.py what goes between them.
"""
