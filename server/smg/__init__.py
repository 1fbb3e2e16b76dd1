"""The service that the router smg speaks to engines over gRPC."""
