"""What the commands of `pagedkv` do; their options are in pagedkv/cli.py. Each command's entry is `run`."""
