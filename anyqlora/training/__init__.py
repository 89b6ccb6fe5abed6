"""What every loop needs whatever the framework: steps, schedule, evaluation, signals, the state of a run."""
