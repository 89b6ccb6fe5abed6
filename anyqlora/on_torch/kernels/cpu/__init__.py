"""Fast paths in C for CPUs, compiled at first use."""
