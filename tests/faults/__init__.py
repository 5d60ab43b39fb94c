"""A corpus of planted faults and of clean runs: what a search for non-finite values is judged by."""
