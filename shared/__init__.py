"""What both processes share: identities, layouts, byte formats, configuration, the kvd client.

Imports neither of them. `types` touches nothing but its arguments; the other packages may.
"""

import os

# gRPC writes lines of its own to stderr, for its developers: one for every stranger whose handshake
# fails. It looks at this once, when it is first imported.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
