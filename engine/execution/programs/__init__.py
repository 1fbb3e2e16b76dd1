"""Compiled programs: how they are made, kept on disk and found again."""
