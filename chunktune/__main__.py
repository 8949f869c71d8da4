"""`python -m chunktune`, which is also what torchrun starts."""

from chunktune.cli.app import main

if __name__ == "__main__":
    raise SystemExit(main())
