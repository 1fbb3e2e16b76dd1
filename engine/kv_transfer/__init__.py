"""Prefix pages that go from one engine to another."""
