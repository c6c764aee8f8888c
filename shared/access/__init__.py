"""Authentication and authorization of callers: the same for gRPC and HTTP, in both processes.

identity      the caller's name, tenants and roles; the identity of the running call
addresses     addresses, alone and in lists
settings      sections [tls] and [clients.NAME]; what an address needs of them to be listened at
sockets       Unix sockets: their paths, their groups
clients       token or certificate -> identity; streams that each client holds
credentials   TLS of servers, which follows renewed files
channels      the client's side: a channel that carries a token or a certificate
denials       why a user may not open a Unix socket
tokens        new tokens

Nothing of a call is read before its caller is known: shared/serving/interceptor.py.
"""
