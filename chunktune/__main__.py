"""`python -m chunktune`, which is also what torchrun starts."""

from chunktune.cli.app import entry

if __name__ == "__main__":
    entry()
