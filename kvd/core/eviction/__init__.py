"""Which session goes first: the policy protocol and the policies."""
