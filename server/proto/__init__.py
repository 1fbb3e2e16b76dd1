"""The gRPC interface: `octavo/v1/octavo.proto`, the code generated from it, and its generator."""
