"""Keras scripts that know nothing of Mezzo, run under a dtype policy."""
