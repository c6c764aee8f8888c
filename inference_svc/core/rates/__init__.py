"""How long steps and loads take, learnt while running; whether loading or computing is sooner."""
