"""What a checkpoint is: architectures, the layers that LoRA takes, weights that are quantized already, the hub."""
