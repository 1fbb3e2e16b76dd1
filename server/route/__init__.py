"""A front over servers elsewhere: `octavo route`."""
