"""Finds an app by its name, `module:app`, for workers, their child processes and commands."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from duly.app.app import App
from duly.errors import ConfigError
from duly.rules.settings import parse_url

# A database named on the command line wins over the one in the code, in child processes too.
FORCED_URL = "DULY_FORCED_URL"


A = TypeVar("A", bound=App)


class CannotImport(ConfigError):
    """The module exists, but its code fails."""


def find_app(spec: str, kind: type[A], *, url: str | None = None) -> A:
    """Import `module:attribute`, with the current folder first on the path. A file, `tasks.py`, works too.

    Without an attribute, the only app of the module is returned. `url` replaces the database of the app.
    """
    module_name, attribute = _parts(spec)
    _current_folder_first()
    module = _imported(module_name, spec)
    _refuse_namesake(module, spec)
    app = _attribute(module, attribute, spec) if attribute else _only_app(module, spec)
    if not isinstance(app, kind):
        raise ConfigError(
            f"{spec}: {attribute} is a {type(app).__name__}, not a Duly app{_app_meant(module, attribute)}"
        )
    name = attribute or next(name for name, value in vars(module).items() if value is app)
    app.spec = f"{module_name}:{name}"
    _force(app, url)
    return app


def _parts(spec: str) -> tuple[str, str]:
    """Split `module:app`. A file becomes a module, relative to the current folder."""
    file, _, attribute = (part.strip() for part in spec.partition(":"))
    module = _module_of(file, spec) if file.endswith(".py") or "/" in file or os.sep in file else file
    if not module or module.startswith("."):
        raise ConfigError(f"{spec!r} names no module: write module:app, as in tasks:app")
    return module, attribute


def _module_of(file: str, spec: str) -> str:
    path, here = Path(os.path.abspath(file)), Path.cwd()
    if not path.is_relative_to(here):
        raise ConfigError(f"{spec}: {path} is not below this folder ({here}): go to its folder, or name a module")
    if not path.exists() and not path.with_suffix(".py").exists():
        raise ConfigError(f"{spec}: there is no file {path}{_file_meant(path.stem, path.parent)}")
    parts = path.relative_to(here).with_suffix("").parts
    if any("." in part for part in parts):
        raise ConfigError(f"{spec}: a module cannot be imported from a path with a dot in it: rename it")
    return ".".join(parts[:-1] if parts[-1:] == ("__init__",) else parts)


def _current_folder_first() -> None:
    here = str(Path.cwd())
    if sys.path[:1] != [here]:
        sys.path.insert(0, here)


def _imported(name: str, spec: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigError(
                f"{spec}: there is no module {error.name!r} in {Path.cwd()} or on the path"
                f"{_file_meant(error.name, Path.cwd())}"
            ) from None
        raise CannotImport(_cannot_import(spec, error)) from error
    except SystemExit as error:
        raise CannotImport(
            f"{spec} cannot be imported: it ends the program at {_place(error)}; "
            "put that below if __name__ == '__main__'"
        ) from error
    except Exception as error:
        raise CannotImport(_cannot_import(spec, error)) from error


def _file_meant(name: str, folder: Path) -> str:
    module, _, last = name.rpartition(".")
    if module and folder.joinpath(*module.split(".")).with_suffix(".py").exists():
        return f": did you mean '{module}:{last}'?"
    close = get_close_matches(name, [file.stem for file in folder.glob("*.py")], 1)
    return f": did you mean {close[0]!r}?" if close else ""


def _refuse_namesake(module: Any, spec: str) -> None:
    """Raise if another module has the name of a file in this folder, such as Python's own `queue`."""
    name, found = module.__name__, getattr(module, "__file__", None)
    here = Path.cwd() / f"{name}.py"
    if here.exists() and not (found and os.path.exists(found) and here.samefile(found)):
        raise ConfigError(f"{spec}: Python has a module {name!r} of its own: rename {here}")


def _cannot_import(spec: str, error: Exception) -> str:
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    what = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return f"{spec} cannot be imported: {_place(error)}: {' '.join(what.split())}"


def _place(error: BaseException) -> str:
    """Return the line of the user's own code at which an import failed."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    ours = str(Path(__file__).parents[1]) + os.sep
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<frozen ", ours)) and os.sep + "importlib" + os.sep not in frame.filename
    ]
    return f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else "its import"


def _attribute(module: Any, attribute: str, spec: str) -> Any:
    found = module
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise ConfigError(f"{spec}: {module.__name__} has no {part!r}{_app_meant(module, part)}") from None
    return found


def _app_meant(module: Any, name: str) -> str:
    names = _apps(module)
    close = get_close_matches(name, names, 1) or names
    return f": did you mean {close[0]!r}?" if close else ", nor an app by another name: make one, app = Duly()"


def _only_app(module: Any, spec: str) -> App:
    names = _apps(module)
    if not names and hasattr(module, "__path__"):
        inside = [file.stem for folder in module.__path__ for file in Path(folder).glob("[!_]*.py")] or ["tasks"]
        raise ConfigError(
            f"{spec} is a package without an app: name the module in it, as in {module.__name__}.{min(inside)}:app"
        )
    if not names:
        raise ConfigError(f"{spec} has no app: make one there, app = Duly(), or name another module")
    if len(names) > 1:
        name = module.__name__
        raise ConfigError(f"{spec} has {len(names)} apps ({', '.join(names)}): name one, as in {name}:{names[0]}")
    app: App = getattr(module, names[0])
    return app


def _apps(module: Any) -> list[str]:
    """Return the names of the apps of a module, one for each app."""
    names: dict[int, str] = {}
    for name, value in vars(module).items():
        if isinstance(value, App):
            names.setdefault(id(value), name)
    return list(names.values())


def _force(app: App, url: str | None) -> None:
    if url is not None:
        parse_url(url)  # an empty one, of a shell variable that is not set, is not the default
        os.environ[FORCED_URL] = url
    if forced := os.environ.get(FORCED_URL):
        app.database.change(url=forced)
