"""The command `torch-nixl`. Its extra, ``torch-nixl[cli]``, brings typer and rich."""
