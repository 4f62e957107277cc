"""Where people train already: one file for each library. None of them is imported before it is asked for."""
