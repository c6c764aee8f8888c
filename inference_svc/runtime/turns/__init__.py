"""The life of turns: from text to tokens and back, each recorded in its session's transcript."""
