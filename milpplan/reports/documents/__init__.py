"""JSON documents of answers, with certificates: written, read back and checked."""
