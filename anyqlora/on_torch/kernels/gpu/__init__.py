"""Fast paths in Triton for GPUs."""
