"""QLoRA fine-tuning with one command on whatever hardware there is."""

__version__ = "0.1.0"
