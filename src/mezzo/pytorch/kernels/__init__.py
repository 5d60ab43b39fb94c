"""Kernels, one operation a folder: the readable reference beside the fast forms.

In a folder, `reference.py` is the specification, in plain PyTorch operations that run on any device; `cpu.py`
is compiled by Numba, `triton.py` by Triton. `backend.implementation` says which of them a device uses.
"""
