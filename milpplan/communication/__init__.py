"""Messages of a plan: which ranks send how many bytes, over which links, when."""
