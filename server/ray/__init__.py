"""Octavo on a Ray cluster: Ray Serve starts, checks and replaces servers, and fronts find them.

Only `application.py` and `replica.py`, which run where Ray is installed, import Ray at their head.
"""
