"""Kernels, one operation a folder or file: the readable reference beside the fast form."""
