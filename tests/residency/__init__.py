"""Tests of the residency protocol, transaction by transaction."""
