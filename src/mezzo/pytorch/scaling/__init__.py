"""How big the loss scale is, and what is done to the gradients that it scaled."""
