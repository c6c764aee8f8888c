"""Where an HTTP request's turn goes, how it is followed and ended, and what is remembered of it."""
