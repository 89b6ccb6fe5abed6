"""Weights from files, tensor by tensor, and quantized weights back into files."""
