"""Layers that are cheaper when they know what comes after them: a model's head together with its loss."""
