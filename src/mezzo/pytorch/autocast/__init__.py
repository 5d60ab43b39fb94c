"""Which policy is in force where, and which kernel each op then gets."""
