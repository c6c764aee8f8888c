"""kvd plan --paper: the paper's experiments, replayed, beside the numbers that the paper states.

numbers.py has the numbers in the text, each with its place. runs.py defines the replays that the
figures need. end_to_end.py and ablations.py make tables of both, with reasons for differences.
reproduction.py runs everything.
"""
