"""The files of HTTPS, tried before a model is loaded."""

from __future__ import annotations

import ssl

from anypool.entrypoints.server_options import ServerOptions
from anypool.errors import ConfigError


def check_certificates(options: ServerOptions) -> None:
    """Reads what the `ssl_` options name.

    Raises:
        ConfigError: A file is not what it should be, the key is another certificate's, or its password is wrong.
        OSError: A file cannot be read.
    """
    if options.ssl_certfile is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for path in (options.ssl_certfile, options.ssl_keyfile, options.ssl_ca_certs):
        if path is not None:
            open(path, "rb").close()  # ssl's own error does not name the file
    key = options.ssl_keyfile or options.ssl_certfile
    try:
        context.load_cert_chain(options.ssl_certfile, key, lambda: options.ssl_keyfile_password or "")
    except ssl.SSLError as error:
        raise ConfigError(
            f"ssl_certfile={options.ssl_certfile!r} with the private key in {key!r} cannot be used ({error}): both are "
            "PEM files that belong together, and an encrypted key needs ssl_keyfile_password"
        ) from error
    if options.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(options.ssl_ca_certs)
        except ssl.SSLError as error:
            raise ConfigError(f"ssl_ca_certs={options.ssl_ca_certs!r} holds no certificates: {error}") from error
