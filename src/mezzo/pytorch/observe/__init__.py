"""What really ran, in which formats, and why."""
