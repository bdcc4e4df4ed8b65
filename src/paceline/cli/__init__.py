"""The command line `paceline`: commands and exit codes. Packages are imported only when needed."""
