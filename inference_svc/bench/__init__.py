"""inference-svc bench: what the engine costs, and what reuse saves, measured. See README.md here.

Where to begin reading: runner.py; then turns.py, ssd_turns.py, overlap.py with saving.py, serve.py,
decode.py. What they stand on: local_engine.py, kvd_sizes.py, bench_session.py, queued.py. Pure:
presets.py, options.py, interleaved.py, figures.py, report.py, turn_times.py, replay_log.py,
chat_like.py, trace.py.
"""
