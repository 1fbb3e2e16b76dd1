"""Clients that nobody here wrote, against a live server: `make clients`."""
