"""What `torch_nixl.testing` is made of. Import from there."""
