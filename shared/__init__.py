"""What both processes share: identities, layouts, byte formats, configuration, the kvd client.

Imports nothing of ours. The P modules (units, errors, session_key, block_key, kv_layout,
data_socket_protocol) touch nothing but their arguments; the others may.
"""

import os

# gRPC writes lines of its own to stderr, for its developers: one for every stranger whose handshake
# fails. It looks at this once, when it is first imported.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
