"""inference-svc bench: what the engine costs, and what reuse saves, measured. See README.md here.

Where to begin reading: runner.py; then turns.py, ssd_turns.py, overlap.py, decode.py, and serve.py
and policies.py over replay.py. What they stand on: local_engine.py, bench_session.py, workspace.py.
Pure: options.py, figures.py, report.py, trace.py.
"""
