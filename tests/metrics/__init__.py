"""Tests of what a server tells: metrics, log line, dashboard."""
