"""Studies: many planning problems from one file, solved in parallel, with tables and figures of the results."""
