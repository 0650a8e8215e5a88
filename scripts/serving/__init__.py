"""Shared pieces of the serving scripts: checkpoint construction, server processes, HTTP client, result files."""
