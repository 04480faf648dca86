#!/usr/bin/env python3
"""HTTP server with fault injection for the test of data/longcrawl64: serves a folder on 127.0.0.1.

    serve.py DIR LOG [CERTIFICATE PORT]

With CERTIFICATE, a file with a key, it speaks HTTPS; PORT is that of a server without.
Prints its port, then `stalled` whenever it holds a request. Appends the path of each request to LOG, without
the fault. The URL path /FAULT@NAME/path injects the fault into requests for files called NAME, or for all chunks
if NAME is *; /plain/path has no faults. Faults:
  error     HTTP 500                                  once    HTTP 500 for the first request only
  short     closes before the announced length        cut     closes early, without an announced length
  header    a blosc header with another chunk size    html    a text page with status 200
  linked    redirects to the file as Hugging Face does, with its size and SHA-256
  swapped   the same, but to chunk 0.0, and without the size
  resized   the same as linked, with a size one byte too large
  flipped   one bit of the file is inverted, which its decompression does not notice
  first     chunk 0.0 instead
  ftp       redirects to ftp                          plainly   redirects to the server without HTTPS
  https     redirects to itself, with HTTPS
  stall     holds the request until the client disconnects
"""

import hashlib
import os
import ssl
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self, status, body=b"", headers=(), length=None):
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        if length != "none":
            self.send_header("Content-Length", str(length or len(body)))
        self.end_headers()
        self.wfile.write(body)
        if length:  # differs from the body's
            self.close_connection = True

    def redirect(self, path, body, size, target):
        headers = [("Location", target), ("X-Linked-ETag", f'"{hashlib.sha256(body).hexdigest()}"')]
        self.answer(302, b"moved", headers + ([("X-Linked-Size", str(size))] if size else []))

    def do_GET(self):
        fault, path = self.path.strip("/").split("/", 1)
        fault, _, name = fault.partition("@")
        with open(LOG, "a") as log:
            log.write(path + "\n")
        try:
            with open(os.path.join(DIR, path), "rb") as f:
                body = f.read()
        except FileNotFoundError:
            return self.answer(404)
        chunk = os.path.basename(path)
        if (chunk != name and (name != "*" or not chunk[0].isdigit())) or self.path in struck:
            fault = None
        if fault == "once":
            struck.add(self.path)
        if fault in ("error", "once"):
            self.answer(500, b"server error")
        elif fault == "short":
            self.answer(200, body[: len(body) // 2], length=len(body))
        elif fault == "cut":
            self.answer(200, body[: len(body) // 2], length="none")
        elif fault == "header":
            self.answer(200, body[:5] + bytes([body[5] ^ 1]) + body[6:])
        elif fault == "html":
            self.answer(200, b"<html><body>Please log in to this network.</body></html>")
        elif fault == "linked":
            self.redirect(path, body, len(body), "/plain/" + path)
        elif fault == "swapped":
            self.redirect(path, body, None, "/plain/" + os.path.dirname(path) + "/0.0")
        elif fault == "resized":
            self.redirect(path, body, len(body) + 1, "/plain/" + path)
        elif fault == "flipped":
            middle = len(body) // 2
            self.answer(200, body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :])
        elif fault == "first":
            with open(os.path.join(DIR, os.path.dirname(path), "0.0"), "rb") as f:
                self.answer(200, f.read())
        elif fault in ("ftp", "plainly", "https"):
            scheme = "http" if fault == "plainly" else fault
            port = PORT if fault == "plainly" else server.server_port
            self.answer(302, b"moved", [("Location", f"{scheme}://127.0.0.1:{port}/plain/{path}")])
        elif fault == "stall":
            print("stalled", flush=True)
            self.rfile.read(1)  # returns when the client closes the connection
            self.close_connection = True
        else:
            self.answer(200, body)

    def log_message(self, *args):
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64  # clients connect all at once; a rejected one retries only after a second

    def handle_error(self, request, client_address):
        if not isinstance(sys.exc_info()[1], ConnectionError):  # the test kills clients
            super().handle_error(request, client_address)


DIR, LOG, CERTIFICATE, PORT = (sys.argv[1:] + [None, None])[:4]
struck = set()
server = Server(("127.0.0.1", 0), Handler)
if CERTIFICATE:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)
    server.socket = context.wrap_socket(server.socket, server_side=True)
print(server.server_port, flush=True)
server.serve_forever()
