"""Kept for pickles of version 0.1.0, which name a class in this package."""
