"""Measures torch_nixl and its rivals side by side, in one run: what `torch-nixl bench` runs."""
