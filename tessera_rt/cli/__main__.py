"""``python -m tessera_rt.cli``."""

from tessera_rt.cli.app import main

if __name__ == "__main__":
    main()
