"""Who calls, and what they may: the same for gRPC and HTTP, in both processes.

identity.py     P   an identity: its tenants and roles
settings.py     P   sections [tls] and [clients.NAME]
addresses.py    P   addresses, and which of them may be listened on
clients.py      P   token or certificate -> identity
streams.py      P   how many streams each client holds
current.py          the identity of the running call
interceptor.py      gRPC: nothing of a call is read before its caller is known
server_options.py   what a connection of gRPC may cost
http.py             the same for an HTTP request
refusals.py         the log of who was turned away
credentials.py      TLS of servers, which follows renewed files
sockets.py          Unix sockets of a group
channels.py         the other side: a channel with a token or a certificate
metadata.py         how it carries the token
tokens.py           new tokens
"""
