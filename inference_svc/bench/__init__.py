"""inference-svc bench: measures what the engine costs and what reuse saves. See README.md here.

Start reading at runner.py. Then come the parts: turns.py, ssd_turns.py, overlap.py, overflow.py,
decode.py, prefill.py, copies.py, `serve` in replay.py, and policies.py, which is based on it. They
are built on local_engine.py, bench_session.py, stock_model.py, random_model.py and workspace.py.
trace.py has the sessions that are replayed, and writes them for `kvd plan`. report.py shows the
figures.
"""
