LANES = 16
"""Floats of a 512-bit register. Sizes of the training kernels are multiples of it."""
