"""The version, in the one place from which packaging and every folder read it."""

VERSION = "0.2.0"
