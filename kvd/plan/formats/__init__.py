"""Published traces of other shapes than a plan's own: what each lacks is filled, and said."""
