"""The folder that `mezzo run` puts at the front of PYTHONPATH for the processes that its script starts."""
