"""Plans made before a server is started: how many requests fit, plain and with HiSparse, and which settings follow."""
