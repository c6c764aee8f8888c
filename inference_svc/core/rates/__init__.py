"""What steps and loads take, learnt while running, and what pays by that."""
