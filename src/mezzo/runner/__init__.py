"""How a user's own script is run, whichever framework it trains with: its surroundings, seeds, patches and records."""
