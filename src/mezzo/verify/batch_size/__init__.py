"""The largest batch size of an unmodified script: run at one size after another, each in a process of its own."""
