"""The report's figures, one a file: SVG and HTML that need no script, with text of one size at any width."""
