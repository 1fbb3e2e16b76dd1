"""Weights as programs read them: in which variant, and how they lie in memory."""
