"""What both processes share: identities, layouts, byte formats, configuration, the kvd client.

Imports nothing of ours. The P modules (units, errors, session_key, block_key, kv_layout,
data_socket_protocol) touch nothing but their arguments; the others may.
"""
