"""Measured rates of steps and loads, and the choice between loading and computing."""
