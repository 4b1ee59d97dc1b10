"""Dynamic mask attention in C++ on a CPU."""
