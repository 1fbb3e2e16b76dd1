"""Calls of agents' tools, checked on live servers: `python -m benchmarks.tool_calls`."""
