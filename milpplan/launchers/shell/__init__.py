"""Reader of shell scripts: the training command of a launch script, without running the script."""
