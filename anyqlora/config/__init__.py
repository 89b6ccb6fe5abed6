"""What was asked: every setting once, where its value came from, and what is refused before anything is read."""
