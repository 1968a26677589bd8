"""Entry point of the command `torch-nixl`; imports what the extra brings only once it runs."""

from __future__ import annotations

import sys

_EXTRA_MODULES = {"typer", "rich", "click"}


def run() -> None:
    """Run the command line. Exits with status 2 and one sentence if the extra is missing."""
    try:
        from torch_nixl.cli.app import app
    except ModuleNotFoundError as exc:
        if (exc.name or "").partition(".")[0] not in _EXTRA_MODULES:
            raise
        sys.stderr.write(
            f"torch-nixl: the command line needs the package {exc.name}, which is not installed: "
            "pip install 'torch-nixl[cli]'\n"
        )
        raise SystemExit(2) from None
    app()


if __name__ == "__main__":
    run()
