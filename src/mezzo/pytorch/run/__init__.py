"""Scripts that know nothing of Mezzo, run under a policy."""
