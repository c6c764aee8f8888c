"""Which session an HTTP request goes to, how its turn ends, and what is stored of it."""
