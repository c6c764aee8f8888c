"""The measuring kit of benches, evals and plans.

statistics   medians, percentiles, intervals, interleaved pairs
workspace    directories that are removed, memory, an end on Ctrl-C, what the machine is
options      a command's options as dataclasses
report       a JSON document and tables, written down
plots        pictures by matplotlib
"""
