"""The command line: one file a command, all of them thin; `app` owns errors and exit codes."""
