"""``python -m kvist``: the same as the command ``kvist``."""

from kvist.cli import main

if __name__ == "__main__":
    main()
