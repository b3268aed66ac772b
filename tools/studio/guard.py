"""Refuse requests of other users, of other pages, and without the token where there is one.

    Host     must be the address that the studio was given, or a name of the loopback; another name is DNS rebinding
    Origin   must be that of the studio where a browser sends one; other pages may not ask
    token    in the address once (?token=...), then in a cookie that scripts and other sites do not get
    user     without a token, the process that connects over the loopback must belong to the same user, or to root

The content policy of each answer allows only scripts, styles and pictures of the studio, so that no text of a run is
executed.
"""

import ipaddress
import os
import struct
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from model_specs.untrusted import is_secret

COOKIE = "slipstream_studio"
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def guard(*, host: str, port: int, token: str | None) -> Middleware:
    """Return the middleware that refuses requests. `token`: None where none is needed."""
    names = {*_LOOPBACK, host, f"[{host}]"} if is_loopback(host) or token is None else None

    @web.middleware
    async def checked(request: web.Request, handler: Handler) -> web.StreamResponse:
        response = refused(request) or await answer(request, handler)
        response.headers.update(_HEADERS)
        return response

    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        if token is not None and "token" in request.query:
            return _with_cookie(request, token, port)
        try:
            return await handler(request)
        except web.HTTPException as error:
            return web.Response(status=error.status, text=error.text)

    def refused(request: web.Request) -> web.Response | None:
        name = request.host.rpartition(":")[0] if request.host.endswith(f":{port}") else request.host
        if names is not None and name not in names:
            return _refusal(f"the studio does not answer for the name {name!r}; open http://{host}:{port}")
        origin = request.headers.get("Origin")
        if origin is not None and origin != f"http://{request.host}":
            return _refusal("requests of other pages are refused")
        if request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin") and request.path != "/":
            return _refusal("requests of other pages are refused")
        if token is not None:
            given = request.query.get("token") or request.cookies.get(f"{COOKIE}_{port}", "")
            if not is_secret(given, token):
                return _refusal("open the address with the token that the studio shows at its start")
        elif not same_user(request.transport):
            return _refusal("this studio belongs to another user of this host")
        return None

    return checked


def _with_cookie(request: web.Request, token: str, port: int) -> web.Response:
    """Return a redirection to the same address without the token, which then stays out of the history."""
    response = web.Response(status=302, headers={"Location": str(request.rel_url.without_query_params("token"))})
    response.set_cookie(f"{COOKIE}_{port}", token, httponly=True, samesite="Strict", path="/")
    return response


def _refusal(why: str) -> web.Response:
    return web.json_response({"error": why}, status=403)


def is_loopback(host: str) -> bool:
    """Return whether only this host can connect to an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def same_user(transport: object, tables: Path = Path("/proc/net")) -> bool:
    """Return whether the other end of a connection over the loopback belongs to this user or to root. True where its
    owner is not known."""
    peer = getattr(transport, "get_extra_info", lambda _: None)("peername")
    if not peer:
        return True
    address = ipaddress.ip_address(peer[0].partition("%")[0])
    words = struct.unpack(f"={len(address.packed) // 4}I", address.packed)
    local = "".join(f"{word:08X}" for word in words) + f":{peer[1]:04X}"
    try:
        table = (tables / ("tcp" if address.version == 4 else "tcp6")).read_text()
    except OSError:
        return True
    rows = [line.split() for line in table.splitlines()[1:]]
    owners = {int(row[7]) for row in rows if row[1] == local and row[3] == "01"}
    return not owners or bool(owners & {os.getuid(), 0})
