"""The queue: a daemon that decides which job runs next and where, and what it needs to start and find them.

``daemon`` (sockets) -> ``dispatcher`` (decisions become effects) -> ``store`` (SQLite) and ``node`` (processes on one
machine, each with a folder and a ``runner``). ``client`` and ``cli`` speak to the daemon.
"""
