"""How frozen weights are kept: one file for each library, one class for each name in `tables.QUANTIZERS`.

A quantizer has
    bits
    empty(linear) -> module             the module that will hold the weight, on the meta device
    fill(module, weight) -> Parameter   the packed parameter; `weight` [out, in] float32 or bf16 on the target device
    dequantize(module) -> Tensor        [out, in] in the compute dtype
    packed(module) -> Tensor            the codes, for counting and for asserting that they are there
"""
