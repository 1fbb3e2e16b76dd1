"""The Open Inference Protocol over gRPC, as Triton's clients speak it."""
