"""What is learned: one class for each name in `registry.ADAPTERS`; base.py says what one has."""
