"""Has Transformers do what it does once in a process, before services are forked from this one.

At the first model that it loads it compiles the patterns of the names of all models' weights, which
would be most of a tiny model's start.
"""

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("llama")
