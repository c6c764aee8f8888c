"""inference-svc bench: what the engine costs, and what reuse saves, measured. See README.md here.

Where to begin reading: runner.py; then the parts: turns.py, ssd_turns.py, overlap.py, overflow.py,
decode.py, and serve.py and policies.py over replay.py. What they stand on: local_engine.py,
bench_session.py, random_model.py, workspace.py; trace.py has the sessions that are replayed.
report.py shows the figures, plan_trace.py puts the same sessions to `kvd plan`.
"""
