"""kvd plan --paper: the paper's experiments, replayed, beside the numbers the paper states.

numbers.py has what the text states, each number with its place; runs.py says which replays the
figures need; end_to_end.py and ablations.py put both into tables, with reasons where they differ;
reproduction.py does all of it in one call.
"""
