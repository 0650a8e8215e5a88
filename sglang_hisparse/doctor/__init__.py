"""Whether this machine can run the server: one line for each thing that has to be there, with what to do about it."""
