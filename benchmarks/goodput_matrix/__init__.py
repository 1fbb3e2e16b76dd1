"""The comparison of scheduling policies over workloads and loads: see `docs/scheduling.md`."""
