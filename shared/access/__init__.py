"""Who calls, and what they may: the same for gRPC and HTTP, in both processes.

identity      who a caller is: tenants and roles; the identity of the running call
addresses     addresses, alone and in lists
settings      sections [tls] and [clients.NAME]; what addresses need of them to be listened at
sockets       Unix sockets: their paths, their groups
clients       token or certificate -> identity; streams that each client holds
refusals      the log of who was turned away
credentials   TLS of servers, which follows renewed files
channels      the other side: a channel that carries a token or a certificate
denials       what such a channel reports when it is refused
tokens        new tokens

Nothing of a call is read before its caller is known: shared/serving/interceptor.py.
"""
