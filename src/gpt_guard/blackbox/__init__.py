"""Black box: a failing step as a folder of plain data, written by the run and opened by any other process."""
