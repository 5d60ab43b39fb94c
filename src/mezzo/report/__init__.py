"""Records in, one HTML file out. Imports core only."""
