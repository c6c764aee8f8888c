"""Routing: the server for a session's turns, for a balancer in front of servers and for plans.

    hash_ring       the server of a session, by names alone
    session_router  the server of its next turn, by which one holds its KV and the cost of waiting

Pure; nothing here knows how turns are sent.
"""
