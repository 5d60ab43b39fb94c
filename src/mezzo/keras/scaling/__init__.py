"""The loss scale of a Keras optimizer on three backends, and what is done to the gradients that it scaled."""
