"""Which process this is, and how the processes of a run talk."""
