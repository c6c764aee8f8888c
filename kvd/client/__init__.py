"""The operators' side of kvd: finding its sockets, and calling its Operator and Reader services."""
