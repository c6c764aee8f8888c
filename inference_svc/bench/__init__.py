"""inference-svc bench: what the engine costs, and what reuse saves, measured. See README.md here.

Where to begin reading: runner.py; then the parts: turns.py, ssd_turns.py, overlap.py, overflow.py,
decode.py, prefill.py, copies.py, `serve` in replay.py, and policies.py over it. What they stand on:
local_engine.py, bench_session.py, stock_model.py, random_model.py, workspace.py; trace.py has the
sessions that are replayed, and puts them to `kvd plan`. report.py shows the figures.
"""
