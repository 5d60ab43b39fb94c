"""What this hardware can do in each format: measured here, or by datasheet for a GPU that is elsewhere."""
