LANES = 16
"""Floats of a register of 512 bits; sizes that the training kernels take are multiples of it."""
