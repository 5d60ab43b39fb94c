"""Ordinary FP32 training scripts that know nothing of Mezzo."""
