"""Between Hugging Face's form of a model and mlx-lm's."""
