"""Whole jobs, each on one page, and the processes that they are started in."""
