"""How processes share the work: one file for each name in `tables.STRATEGIES`; `single` is the base of them all."""
