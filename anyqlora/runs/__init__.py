"""What lies on disk: run directories, checkpoints, where they came from, the model card."""
