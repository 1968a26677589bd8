"""Entry point of the command `torch-nixl`; imports what the extra brings only once it runs."""

from __future__ import annotations

import sys

_MENDS = {
    **dict.fromkeys(("typer", "rich", "click", "matplotlib"), "pip install 'torch-nixl[cli]'"),
    **dict.fromkeys(("torch", "numpy", "pydantic"), "pip install torch-nixl"),
}
"""What brings a package that may be missing."""


def run() -> None:
    """Run the command line. Exits with status 2 and one sentence if a package is missing."""
    try:
        from torch_nixl.cli.app import app

        app()
    except ModuleNotFoundError as exc:
        package = (exc.name or "").partition(".")[0]
        mend = _MENDS.get(package)
        if mend is None:
            raise
        sys.stderr.write(
            f"torch-nixl: this needs the package {package}, which is not installed: {mend}\n"
        )
        raise SystemExit(2) from None


if __name__ == "__main__":
    run()
