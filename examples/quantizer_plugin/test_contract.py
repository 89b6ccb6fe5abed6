"""python -m pytest examples/quantizer_plugin, with the package installed."""

from anyqlora.testing import QuantizerContract


class TestRowwise6(QuantizerContract):
    quantizer = "rowwise6"
    tolerance = 0.04  # the largest of 192 normally distributed weights is near 3, and a step 3 / 31
