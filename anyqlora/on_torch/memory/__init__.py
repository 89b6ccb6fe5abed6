"""Memory beside the model's own: the C heap, and activations that wait in host memory."""
