"""Settings of a whole process, of those that are Octavo's own: begin with `own_process.py`."""
