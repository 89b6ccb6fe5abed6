"""What will happen, decided before it does: the machine, capabilities, the plan, the memory it takes."""
