"""Sessions of HTTP requests: routing, completion of turns, and what is stored between requests."""
