"""Launch files of training frameworks: export of plans, import of existing files, and each launcher's limits."""
