"""How frozen weights are kept: one file for each library, one class for each name in `registry.QUANTIZERS`; base.py
says what one has.
"""
