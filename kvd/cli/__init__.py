"""The `kvd` command: a module for each family of commands, put together by `main.py`.

`serve` is the daemon itself. Most other commands call a running daemon (`kvd/client`); `plan`,
`bench`, `doctor`, `key`, `token` and `install-units` do without one.
"""
