"""What `benchmarks/device_suite.py` is made of."""
