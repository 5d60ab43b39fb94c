"""Which parameters are stored in 16 bits, and where their FP32 values are meanwhile."""
