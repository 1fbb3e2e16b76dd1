"""Quantized checkpoints: one file a format.

A format knows which tensors a linear layer has on disk, checks them, and makes `StoredTensor`s of
them, which read as the numbers they stand for. `formats.py` finds the format of a config.json.
Families and blocks know nothing of any of them.

Activations are never rounded: formats that have them rounded to eight bits are read as weights
alone, which is nearer to what was trained.
"""
