"""What a person sees of a run: the console, the live panel, trackers, the summary."""
