"""The ClientApp: hands a letter to the resident node over its unix socket, and answers with what comes back.

Flower starts a process per letter, so this file imports neither torch nor sparing. A frame is 8 bytes of length,
little-endian, then as many bytes. The node answers the same letter the same way however often it is asked.
"""

import socket
import struct
import time

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from pieces import content_letter, letter_content, read_exactly

LENGTH = struct.Struct("<Q")
PAUSE_S = 0.5
CLIENT_AT = 56  # where the head of a letter says whom it is for
app = ClientApp()


@app.query()
def answer_letter(message: Message, context: Context) -> Message:
    """What the resident node says to the letter; an exception becomes Flower's error reply."""
    settings = context.node_config
    most, patience = int(settings.get("most_bytes", 2**31)), float(settings.get("patience", 60.0))
    letter = content_letter(message.content, most)
    path = node_socket(context, letter)
    reply = exchange(path, letter, most, patience, time.monotonic() + message.metadata.ttl)
    return Message(letter_content(reply), reply_to=message)


def node_socket(context: Context, letter: bytes) -> str:
    """Of this node; in Flower's simulation, whose nodes are all alike, that of the client whom the letter is for."""
    if "socket" in context.node_config:
        return str(context.node_config["socket"])
    simulated = str(context.run_config.get("node-sockets", ""))
    if not simulated:
        raise KeyError("the node config names no socket: start the SuperNode with --node-config 'socket=\"PATH\"'")
    return simulated.format(int.from_bytes(letter[CLIENT_AT : CLIENT_AT + 4], "little"))


def exchange(path: str, letter: bytes, most: int, patience: float, until: float) -> bytes:
    """Send one frame and read one back; where the connection breaks in between, send it again."""
    while True:
        with connect_node(path, patience, until) as connection:
            try:
                connection.sendall(LENGTH.pack(len(letter)))
                connection.sendall(letter)
                return read_frame(connection, most)
            except (ConnectionError, TimeoutError) as error:
                if time.monotonic() > until:
                    raise TimeoutError(f"the node at {path} gave no answer in the letter's time ({error})") from error
        time.sleep(PAUSE_S)


def connect_node(path: str, patience: float, until: float) -> socket.socket:
    """A connection to the resident node, which may be restarting."""
    limit = min(time.monotonic() + patience, until)
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(max(1.0, until - time.monotonic()))
        try:
            connection.connect(path)
            return connection
        except OSError as error:
            connection.close()
            if time.monotonic() > limit:
                raise ConnectionError(f"nobody listens at {path} ({error}): is `sparing join` running?") from error
        time.sleep(PAUSE_S)


def read_frame(connection: socket.socket, most: int) -> bytes:
    (length,) = LENGTH.unpack(read_exactly(connection, LENGTH.size))
    if length > most:
        raise ValueError(f"the node answered {length} bytes, more than most_bytes = {most} of the node config")
    return read_exactly(connection, length)
