"""The learning rate at each step, and the schedulers that set it."""
