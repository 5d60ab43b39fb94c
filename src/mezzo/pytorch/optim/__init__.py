"""Mezzo's optimizers: one fused step over FP32 or 16-bit weights, with masters and states stored as small as asked."""
