"""`python -m gpt_guard`: the `gpt-guard` command."""

from gpt_guard.cli.app import main

if __name__ == "__main__":
    main()
