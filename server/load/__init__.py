"""Load on a server from outside, as its clients see it."""
