"""Runs in pairs, and what they prove."""
