"""The process that `forked.python()` starts: it hands streams and arguments to the fork server, forwards signals to the
program, and ends as the program ends. It imports little, so that it starts in milliseconds.
"""

import json
import os
import signal
import socket
import struct
import sys

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    """Run a program in the fork server."""
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # until there is a program
    server = socket.socket(socket.AF_UNIX)
    server.connect(sys.argv[1])
    umask = os.umask(0)
    request = {"arguments": sys.argv[2:], "folder": os.getcwd(), "umask": umask, "environment": dict(os.environ)}
    body = json.dumps(request).encode()
    socket.send_fds(server, [struct.pack("!I", len(body))], [0, 1, 2])
    server.sendall(body)
    program = struct.unpack("!i", server.recv(4))[0]
    for stream in (0, 1, 2):
        os.close(stream)  # the program alone has them: readers see their end

    def forward(number: int, frame: object) -> None:
        os.kill(program, number)

    for number in FORWARDED:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    content = server.recv(4)
    status = struct.unpack("!i", content)[0] if content else 1
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


main()
