"""Files that the type checker must accept, and lines that it must not."""
