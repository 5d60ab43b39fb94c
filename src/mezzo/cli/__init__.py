"""The command line: one verb a file, parse, call the library, print."""
