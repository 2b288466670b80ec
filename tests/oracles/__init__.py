"""What others compute, written a second time for the tests."""
