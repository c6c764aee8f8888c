"""Which session goes first: the engines' queues, the policies, and when a session expires."""
