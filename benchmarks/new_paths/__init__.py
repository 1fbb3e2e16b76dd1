"""What Messages, Responses, bound calls and embeddings cost: `python -m benchmarks.new_paths`."""
