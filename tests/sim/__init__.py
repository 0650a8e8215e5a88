"""Deterministic simulation of the residency protocol: real coordinator and policy, modelled GPU, links and
scheduler."""
