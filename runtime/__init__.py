"""The torch interpreter of a program."""
