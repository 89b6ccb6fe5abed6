"""A model on its way from a plan to training: loaded, quantized, adapted, made fast, and proven to be what was
planned."""
