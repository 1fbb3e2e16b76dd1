"""Workloads, simulated devices and replays: what to serve when nobody is asking."""
