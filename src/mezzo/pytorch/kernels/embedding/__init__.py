"""Lookups in a 16-bit table whose gradient is summed in FP32 (`reference`)."""
