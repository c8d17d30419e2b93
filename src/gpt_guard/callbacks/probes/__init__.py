"""ModelProbe: questions that are put to the model itself, on a copy of a batch of the loop."""
