"""A policy for a script, found by measuring it: calibrate, assign, write down, compare."""
