"""The active policy of each thread and device, and the kernel that each op gets under it."""
