"""The MLX loop's parts: the only place that knows mlx. The names are those of on_torch, which it never imports."""
