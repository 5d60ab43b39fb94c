"""Mezzo's own kernels, one folder per operation: a readable reference and the compiled forms.

In a folder, `reference.py` is the specification, in plain PyTorch operations that run on any device; `cpu.py`
is compiled by Numba, `triton.py` by Triton. `backend.implementation` chooses the one that a device uses.
"""
