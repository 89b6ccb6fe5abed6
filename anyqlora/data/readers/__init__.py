"""Rows as they lie in files and on the hub, each with the place it came from."""
