"""The `kvd` command: a module for each family of commands, put together by `main.py`.

`serve` is the daemon itself; other commands ask a running one (`kvd/client`), or nobody
(`plan`, `bench`, `doctor`, `key`, `token`, `install-units`).
"""
