"""The command line: dispatch, display and exit codes. Rooms are imported only when they are used."""
