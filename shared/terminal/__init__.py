"""Output of commands on a terminal or into a pipe: tables, bars, settings; and keys."""
