"""Everything that needs torch."""
