"""The largest batch size that trains on this device, and the fastest: tried, and the model put back."""
