"""`mezzo compare`: paired runs in child processes, and the verdict from their records."""
