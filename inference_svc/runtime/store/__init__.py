"""Sessions' KV in kvd: loads, saves, and the streams that save while a turn computes."""
