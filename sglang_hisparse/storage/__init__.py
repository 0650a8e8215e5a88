"""The storage tier (L3): host pages kept in a HiCache storage backend beyond eviction and restart.

`tier.StorageTier` is the entrance; the runtime owns it, the radix cache and two hooks call it. Threads of this package copy
and read or write files; every decision about pages stays on the scheduler's thread.
"""
