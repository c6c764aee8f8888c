"""The measuring kit of benches, evals and plans.

statistics   medians, percentiles, intervals, interleaved pairs
machine      what a figure was measured on
workspace    directories that are removed, memory that is there, an end on Ctrl-C
options      a command's options as a dataclass
report       a JSON document and tables, written down
plots        pictures by matplotlib
"""
