"""Training and evaluation mode: evaluating in the wrong one, training in the wrong one, parts frozen on purpose."""
