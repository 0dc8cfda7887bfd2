"""The version of Motley, which traces and reports carry."""

VERSION = "0.1.0"
