"""How turns run: from text to tokens and back, each recorded in its session's transcript."""
