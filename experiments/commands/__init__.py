"""The commands of the command line, one file each, named as the command is."""
