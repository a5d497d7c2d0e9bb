"""Certificates for the gate and for upstreams, made by OpenSSL."""

import pathlib
import subprocess

NEW_KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "3"]


def made(directory):
    """Makes `ca.pem`, and `server.pem` with `server.key` that it signed, for localhost; gives their directory."""
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    extensions = directory / "extensions"
    extensions.write_text("basicConstraints=CA:FALSE\nsubjectAltName=DNS:localhost,IP:127.0.0.1\n")
    for words in (
        ["req", "-x509", "-subj", "/CN=ca", "-out", "ca.pem", "-keyout", "ca.key", *NEW_KEY],
        ["req", "-subj", "/CN=server", "-out", "server.csr", "-keyout", "server.key", *NEW_KEY],
        ["x509", "-req", "-in", "server.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "3",
         "-extfile", "extensions", "-out", "server.pem"],
    ):
        subprocess.run(["openssl", *words], cwd=directory, check=True, capture_output=True)
    return directory


def listener(directory):
    """The line of `[server]` by which the gate's listeners encrypt."""
    return f'tls = {{ cert = "{directory}/server.pem", key = "{directory}/server.key" }}'


def upstream(url, directory, more=""):
    """The upstream of a configuration, which the authority of this directory vouches for."""
    return f'{{ url = "{url}", tls = {{ ca = "{directory}/ca.pem" }}{more} }}'
