"""How much a model's loss would change if this or that module ran in 16 bits, and what time it would save."""
