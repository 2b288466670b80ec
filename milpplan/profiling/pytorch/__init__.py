"""Machine that PyTorch sees. Only these modules import PyTorch, and only when something is measured."""
