"""The weights of a decoder in the variants that CPUs read beside the plain ones.

A variant is made from weights that were loaded, or read from the checkpoint a second time, and
takes the place of some of them (`tree.with_variants`). Which program reads which is decided in
`engine/execution/weights/weight_variants.py`.
"""
