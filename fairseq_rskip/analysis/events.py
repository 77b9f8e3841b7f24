"""TensorBoard's event files, read without TensorBoard, whose server and grpc nobody needs for that."""

import struct
from pathlib import Path
from typing import Any, Dict, Iterator

from tensorboardX.proto.event_pb2 import Event


def read_events(path: Path) -> Iterator[Any]:
    """The events of one file: records of length (8 bytes), its checksum (4), the event, its checksum (4)."""
    data, start = path.read_bytes(), 0
    while start < len(data):
        (length,) = struct.unpack_from("<Q", data, start)
        yield Event.FromString(data[start + 12 : start + 12 + length])
        start += length + 16


def read_scalars(folder: Path) -> Dict[str, Dict[int, float]]:
    """tag -> step -> value of all event files in ``folder``, as TensorBoard shows them: a file that says it starts at a
    step voids what earlier files hold from that step on.
    """
    found: Dict[str, Dict[int, float]] = {}
    for path in sorted(folder.glob("events.out.tfevents.*"), key=lambda path: path.stat().st_mtime_ns):
        for event in read_events(path):
            if event.HasField("session_log") and event.session_log.status == event.session_log.START:
                found = {tag: {s: v for s, v in values.items() if s < event.step} for tag, values in found.items()}
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    found.setdefault(value.tag, {})[event.step] = value.simple_value
    return {tag: values for tag, values in found.items() if values}
