"""Published traces in other formats than a plan's own. What they lack is drawn, and reported."""
