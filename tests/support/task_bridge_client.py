"""An executor in plain Python that runs the code in its settings, with a function that posts to its bridge."""

from __future__ import annotations

import sys

BRIDGE = """
import http.client, json, os, socket, sys, time

class Bridge(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(sys.argv[1])

def post(path, body):
    bridge = Bridge("bridge")
    bridge.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    answer = bridge.getresponse()
    value = json.loads(answer.read())
    bridge.close()
    return answer.status, value
"""
"""The beginning of an executor: `post` asks its bridge, whose socket is its first argument."""
CLIENT = f"""{BRIDGE}
task = json.loads(sys.argv[2])
exec(task["settings"]["code"])
"""
EXECUTOR = {
    "class": "shell",
    "name": "python",
    "cmd": sys.executable,
    "args": ["-I", "-S", "-c", CLIENT, "{SOCKET_PATH}", "{JOB_JSON}"],
}
"""Configuration of that executor; its code calls `post(path, body)`, which returns status and answer."""
