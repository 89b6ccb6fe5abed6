"""Layers, adapters, quantizers and the loss on MLX."""
