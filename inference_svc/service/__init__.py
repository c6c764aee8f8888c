"""Every way in for turns: the gateway that gRPC and HTTP share, and the gRPC servicer."""
