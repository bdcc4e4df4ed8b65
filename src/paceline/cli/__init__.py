"""The command line: dispatch and exit codes. Packages are imported only when they are used."""
