"""The life of turns: from text to tokens and back, recorded, once each."""
