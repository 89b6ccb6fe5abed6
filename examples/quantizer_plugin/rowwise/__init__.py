"""The row: what a plan has to know of the quantizer, before anything imports torch."""

from anyqlora.extend import QuantizerInfo

ROWWISE6 = QuantizerInfo(
    "rowwise6",
    bits=6,
    torch="rowwise.quantizer:Rowwise6",
    scale_bytes=lambda outputs, inputs, config, framework: 4 * outputs,  # a float32 for each row
    fusable=True,  # its layers do nothing but multiply by the dequantized weight
    strategies=("single",),  # others hand packed weights from process to process: see BroadcastQuantizer
)
