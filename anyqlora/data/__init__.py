"""Rows on their way to batches: readers, formats, templates, tokens and loss masks, all in numpy."""
