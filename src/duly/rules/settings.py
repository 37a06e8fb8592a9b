"""Settings: from an argument, else the environment, else a file, else the default.

Every value has its origin, so that a message about it names the place to change it.
"""

from __future__ import annotations

import os
import re
import tomllib
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit

from duly.errors import ConfigError
from duly.rules.durations import to_ms
from duly.rules.messages import brief

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True, slots=True)
class Url:
    """The URL of the database. Neither its repr nor its str shows a password or a token."""

    store: str
    shown: str
    path: str | None = None
    dsn: str = field(default="", repr=False)

    def __str__(self) -> str:
        """Return the address without secrets."""
        return self.shown


def parse_url(url: str | os.PathLike[str]) -> Url:
    """Read a plain path, or a sqlite, postgresql or d1 URL."""
    if isinstance(url, os.PathLike):
        return _file(os.fspath(url))
    if not url.strip():
        raise ConfigError("the database URL is empty: give a path such as 'jobs.db', or a postgresql:// URL")
    scheme = _SCHEME.match(url)
    if scheme is None:
        return _file(url)
    match scheme[1].lower(), scheme[2]:
        case "sqlite", "://":
            return _sqlite(url[scheme.end() :])
        case "postgresql" | "postgres", "://":
            return _server("postgresql", f"postgresql://{url[scheme.end() :]}")
        case "d1", "://":
            return _server("d1", f"d1://{url[scheme.end() :]}")
        case name, _:
            raise ConfigError(f"'{name}:' is not a database URL duly knows: {_suggested(name)}")


# One letter before a colon is a drive, as in C:\jobs.db.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]+)(://|:)")
_KNOWN = ("sqlite", "postgresql", "postgres", "d1")


def _suggested(scheme: str) -> str:
    """Suggest the URL that was probably meant."""
    if scheme == "file":
        return "write the plain path, such as 'jobs.db'"
    close = get_close_matches(scheme.partition("+")[0], _KNOWN, 1, 0.6)
    if close:
        return f"did you mean '{close[0]}://'?" if close[0] != "sqlite" else "did you mean 'sqlite:///'?"
    return "give a path, sqlite:///… or postgresql://…"


def _sqlite(rest: str) -> Url:
    """Read what follows `sqlite://`: a slash, then the path, which is absolute if it has one more."""
    if not rest.startswith("/") and rest not in ("", ":memory:"):
        raise ConfigError(f"'sqlite://{rest}' has two slashes: write 'sqlite:///{rest}', four for an absolute path")
    path, _, options = rest.removeprefix("/").partition("?")
    if options:
        raise ConfigError(f"'sqlite:///{path}' takes no options after '?': leave them out")
    return _file(path)


def _file(path: str) -> Url:
    """Check the path of a SQLite file."""
    if path in ("", ":memory:"):
        raise ConfigError("a database in memory is refused, as nothing would survive: give a path like 'jobs.db'")
    if "\x00" in path:
        raise ConfigError("the database path has a NUL in it: remove it")
    if _LOGIN.match(path):
        raise ConfigError("this is a login without a scheme: write postgresql://user:password@host/database")
    if _DSN.match(path):
        raise ConfigError("a 'key=value' connection string is not a URL: write postgresql://user@host/database")
    return Url("sqlite", path, path)


_LOGIN = re.compile(r"[^/\s:@]+:[^/\s]*@[^/\s]+")
_DSN = re.compile(r"\s*(host|hostaddr|port|dbname|user|password|service)\s*=")


def _server(store: str, url: str) -> Url:
    """Split the URL of a server, far enough to show it without secrets."""
    # Never quote the URL, urlsplit's own message or libpq's: a password that is not encoded ends up in them.
    wrong = f"the {store}:// URL cannot be read: "
    encode = f"{wrong}percent-encode special characters in user name and password"
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ConfigError(encode) from None
    login, _, hosts = parts.netloc.rpartition("@")
    if _spilled(parts) or "@" in login or _RAW.search(url):
        raise ConfigError(encode)
    if not _HOSTS.fullmatch(hosts):
        raise ConfigError(f"{wrong}look at its host and port" if not login else f"{encode}, and look at its port")
    if store == "d1" and not hosts:
        raise ConfigError(f"{wrong}it has no host")
    # The user of a d1 URL is a token.
    user = f"{login.partition(':')[0]}@" if login and store != "d1" else ""
    return Url(store, f"{store}://{user}{hosts}{parts.path}", dsn=url)


# libpq would quote these in its error: a blank, or a per cent sign without a code.
_RAW = re.compile(r"\s|%(?![0-9A-Fa-f]{2})")
# One host, or several as libpq takes them, each with an optional port.
_HOST = r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._%\-]*)(:[0-9]*)?"
_HOSTS = re.compile(f"{_HOST}(,{_HOST})*")


def _spilled(parts: SplitResult) -> bool:
    """Return whether an unencoded `/`, `?` or `#` in a password split the URL at the wrong place."""
    return bool(parts.fragment) or "@" in parts.path or ("@" in parts.query and "@" not in parts.netloc)


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings of an app, with the defaults of the contract."""

    url: Url = Url("sqlite", "duly.db", "duly.db")
    listen_url: Url | None = None
    schema: str = "duly"
    prepared: bool = True
    durability: str = "full"
    max_attempts: int = 5
    max_payload: int = 96_000
    lease_ms: int = 30_000
    keep_ms: int = 7 * 86_400_000
    result_ttl_ms: int = 86_400_000
    key_ttl_ms: int = 15 * 86_400_000
    poll_ms: int = 1_000
    busy_timeout_ms: int = 5_000
    connect_timeout_ms: int = 2_000
    d1_timeout_ms: int = 10_000
    d1_statements: int = 45
    grace_ms: int = 30_000
    origins: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    def origin(self, name: str) -> str:
        """Return the origin of a setting: "argument", "$DULY_LEASE", "duly.toml" or "default"."""
        if name not in _READERS:
            raise ConfigError(f"there is no setting '{name}'{_meant(name)}")
        return self.origins.get(name, "default")


def load(
    arguments: Mapping[str, Any],
    environ: Mapping[str, str],
    file_text: str | None = None,
    file_name: str = "duly.toml",
) -> Settings:
    """Gather the settings; None means not given."""
    given: dict[str, tuple[Any, str]] = {}
    if file_text is not None:
        given |= _from_file(file_text, file_name)
    given |= _from_environment(environ)
    given |= _named({name: value for name, value in arguments.items() if value is not None}, "argument")
    values = {}
    for name, (value, origin) in given.items():
        values[_field(name)] = _READERS[name](value, f"{name} (from {origin})")
    return Settings(**values, origins=MappingProxyType({name: origin for name, (_, origin) in given.items()}))


def read(arguments: Mapping[str, Any], environ: Mapping[str, str], folder: Path) -> Settings:
    """Gather the settings of a program in `folder`, with its duly.toml; paths are relative to `folder`."""
    file = folder / "duly.toml"
    try:
        text = file.read_text("utf-8") if file.is_file() else None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read ({error}): mend it, or take it away") from error
    found = load(arguments, environ, text, str(file))
    if found.url.path is None:
        return found
    return replace(found, url=replace(found.url, path=str(folder / found.url.path)))


def _from_file(text: str, file_name: str) -> dict[str, tuple[Any, str]]:
    """Read duly.toml, or the table [tool.duly] of pyproject.toml."""
    try:
        table: Any = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        why = "it has a number of more than 4,300 digits" if "set_int_max_str" in str(error) else error
        raise ConfigError(f"{file_name} is not valid TOML: {why}") from error
    if os.path.basename(file_name) == "pyproject.toml":
        table = table.get("tool", {}).get("duly", {})
        if not isinstance(table, dict):
            raise ConfigError(f"tool.duly (from {file_name}) is not a table: write it as [tool.duly]")
    return _named(table, file_name)


def _from_environment(environ: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    """Read the variables that name a setting; an empty one counts as not set."""
    found: dict[str, tuple[Any, str]] = {}
    for variable, value in environ.items():
        name = variable.removeprefix("DULY_").lower()
        if not variable.startswith("DULY_") or not value:
            continue
        if name in _READERS:
            found[name] = (value, f"${variable}")
        # Commands have variables of their own, so only likely misspellings are refused.
        elif close := get_close_matches(name, _READERS, 1, 0.8):
            raise ConfigError(f"${variable} is not a setting: did you mean $DULY_{close[0].upper()}?")
    return found


def _named(table: Mapping[str, Any], origin: str) -> dict[str, tuple[Any, str]]:
    """Raise for names that are no setting; add the origin to the others."""
    for name in table:
        if name not in _READERS:
            raise ConfigError(f"'{name}' (from {origin}) is not a setting{_meant(name)}")
    return {name: (value, origin) for name, value in table.items()}


def _meant(name: str) -> str:
    """Suggest the setting whose name is nearest."""
    close = get_close_matches(name, _READERS, 1)
    return f": did you mean '{close[0]}'?" if close else f": the settings are {', '.join(_READERS)}"


def _field(name: str) -> str:
    """Return the field of a setting; durations have the suffix `_ms` only there."""
    return name if name in Settings.__dataclass_fields__ else f"{name}_ms"


def _url(value: Any, what: str) -> Url:
    """Read a URL or a path."""
    if isinstance(value, Url):
        return value
    if not isinstance(value, str | os.PathLike):
        raise ConfigError(f"{what} is of type {type(value).__name__}: give a path or a URL")
    try:
        return parse_url(value)
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from error


def _schema(value: Any, what: str) -> str:
    """Read the name of a schema, which is put into SQL without quotes."""
    if not isinstance(value, str) or not re.fullmatch(r"[a-z_][a-z0-9_]{0,62}", value):
        raise ConfigError(f"{what} is {brief(value)}: give a name of lower case letters, digits and _, at most 63")
    return value


def _durability(value: Any, what: str) -> str:
    """Read the durability of a commit."""
    if value not in ("full", "normal"):
        raise ConfigError(f"{what} is {brief(value)}: give 'full', or 'normal' to risk a power cut's last commits")
    return str(value)


def _count(value: Any, what: str) -> int:
    """Read a whole number above zero."""
    number = int(value) if isinstance(value, str) and re.fullmatch(r"[0-9]{1,18}", value.strip()) else value
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ConfigError(f"{what} is {brief(value)}: give a whole number, 1 or more")
    return number


def _switch(value: Any, what: str) -> bool:
    """Read a yes or no."""
    words = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    said = words.get(str(value).strip().lower())
    if said is None:
        raise ConfigError(f"{what} is {brief(value)}: give true or false")
    return said


def _duration(value: Any, what: str) -> int:
    """Read a duration."""
    return to_ms(value, what=what)


def _span(value: Any, what: str) -> int:
    """Read a duration that must not be zero."""
    span_ms = to_ms(value, what=what)
    if span_ms == 0:
        raise ConfigError(f"{what} is zero: give a duration above zero")
    return span_ms


_READERS: Mapping[str, Callable[[Any, str], Any]] = MappingProxyType(
    {
        "url": _url,
        "listen_url": _url,
        "schema": _schema,
        "prepared": _switch,
        "durability": _durability,
        "max_attempts": _count,
        "max_payload": _count,
        "lease": _span,
        "keep": _duration,
        "result_ttl": _duration,
        "key_ttl": _duration,
        "poll": _span,
        "busy_timeout": _span,
        "connect_timeout": _span,
        "d1_timeout": _span,
        "d1_statements": _count,
        "grace": _duration,
    }
)
