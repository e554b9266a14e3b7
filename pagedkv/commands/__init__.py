"""What the commands of `pagedkv` do; their options are in pagedkv/cli.py. Each module has one entry, `run`."""
