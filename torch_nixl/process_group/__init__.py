"""The c10d backend "nixl": what `torch.distributed` asks for, in terms of p2p and collectives."""
