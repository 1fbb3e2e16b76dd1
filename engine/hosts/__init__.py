"""One engine over several hosts: one plans, and the devices of all do what the same log says."""
