"""Fronts of the engine: gRPC service and clients, and the command line."""
