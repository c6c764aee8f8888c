"""What commands show on a terminal or into a pipe: tables, colours, keys."""
