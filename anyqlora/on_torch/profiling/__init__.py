"""What a run can be watched with: torch.profiler, the timeline, the hooks both hang on."""
