"""What the experiments run in processes of their own."""
