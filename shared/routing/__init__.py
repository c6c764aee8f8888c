"""Which server a session's turns go to, for a balancer in front of servers and for plans.

    hash_ring       whose a session is, by names alone
    session_router  where its next turn goes, by who holds its KV and what waiting there costs

Pure; nothing here knows how turns travel.
"""
