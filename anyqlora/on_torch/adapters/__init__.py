"""What is learned: one class for each name in `tables.ADAPTERS`.

An adapter has
    choose(model)                           decides, on the model before its weights are read, which linear layers it goes on
    residual(name, weight) -> weight        what the frozen module is to hold, while its full-precision weight passes by
    observe(name, weight, held)             what was put in its place, dequantized (only when `observes`)
    attach(model) -> model                  adds what is learned
    trainable(model) -> {name: Parameter}   by the names of the file format, sorted
    tensors(trainable) -> {name: Tensor}    what the finished file holds
    describe() -> dict                      adapter_config.json; empty for full fine-tuning

Adapters go on linear layers only: the experts of a mixture stay frozen (and quantized), its attention and shared layers learn.
"""
