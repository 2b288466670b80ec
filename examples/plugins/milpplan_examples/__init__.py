"""Examples of plug-ins for milpplan: a solver, a cost model, hardware."""
