"""The measuring kit of benches, evals and plans.

statistics   medians, percentiles, intervals, interleaved pairs
workspace    temporary directories, memory checks, an end on Ctrl-C, facts of the machine
options      a command's options as dataclasses
report       a JSON document and tables
plots        pictures by matplotlib
"""
