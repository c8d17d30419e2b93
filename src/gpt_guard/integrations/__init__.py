"""Ways in for frameworks that own the loop; each file needs its framework, and is imported by its own name."""
