"""Makes Transformers do its once-per-process work before services are forked from this process.

When it loads its first model it compiles the patterns of all models' weight names, which would be
most of a tiny model's start.
"""

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("llama")
