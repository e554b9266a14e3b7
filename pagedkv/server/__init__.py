"""The OpenAI-compatible HTTP server. Needs the extra `pagedkv[server]`."""
