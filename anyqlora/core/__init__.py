"""What everything stands on: errors, the registry of names, files, the terminal. It knows no setting and no model."""
