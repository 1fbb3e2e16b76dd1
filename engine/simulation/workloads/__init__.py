"""Workloads: requests with arrivals, lengths, targets and prompts, drawn or read from traces."""
