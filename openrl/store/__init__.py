"""SQLite, one file, one connection, one thread: everything that must outlive the process. SQL lives only here."""
