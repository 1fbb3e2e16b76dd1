"""What an engine is on the devices at hand, decided once: begin with `engine_setup.py`."""
