"""The short loop: what `MixedPrecision` does between a loss and the next one, and in which order."""
