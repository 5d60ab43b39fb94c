"""What this hardware can do, measured."""
