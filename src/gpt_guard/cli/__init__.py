"""The commands of `gpt-guard`, one file each; torch is imported inside those that need it."""
