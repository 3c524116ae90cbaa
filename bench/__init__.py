"""Microbenchmarks of the operators, beside what one would use instead: `python -m bench --help`."""
