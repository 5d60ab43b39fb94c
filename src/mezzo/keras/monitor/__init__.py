"""Looking at the training of a Keras model from a callback: its scale, its losses, the ranges of its numbers."""
