"""Which dtype policy each layer of a Keras model gets, and whether what it gives its loss is FP32."""
