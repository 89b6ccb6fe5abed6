"""What was learned, in the forms that other tools take."""
