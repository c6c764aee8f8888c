"""Everything that made the demo model: tokenizer, generated tasks, training, evaluation."""
