"""One call of any operation, from its arguments to a backend; knows no operation."""
