"""What a person sees who follows a repo's URL in a browser: its files and its card as text; reads only.

A browser asks for a name and password: any name, and a token as the password.
"""

from collections.abc import Iterable
from html import escape
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from devhub.access import check_visible
from devhub.door import account, storage, visible_repo
from devhub.errors import HubError, RepoHidden, RepoNotFound
from devhub.names import RepoId
from devhub.repository import DEFAULT_BRANCH, Commit, Settings
from devhub.routing import route

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
}
_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "td{padding:.1rem 1.5rem .1rem 0}td:nth-child(2){text-align:right}"
    "pre{white-space:pre-wrap;background:#8881;padding:1rem}"
)


def index(request: Request) -> Response:
    """The repos the visitor may see."""
    who = account(request)
    visible = []
    for repo in storage(request).repos():
        try:
            check_visible(who, repo, storage(request).find(repo).settings())
        except RepoNotFound:
            continue
        visible.append(f'<li><a href="{repo.url_path}">{escape(str(repo))}</a></li>')
    return _page("devhub", [f"<ul>{''.join(visible)}</ul>" if visible else "<p>No public repos.</p>"])


def repo(request: Request) -> Response:
    """One repo at one revision."""
    try:
        found, settings = visible_repo(request)
        commit = found.at(request.path_params.get("revision", DEFAULT_BRANCH))
    except RepoHidden:
        return HTMLResponse("A token is needed.", 401, {"WWW-Authenticate": 'Basic realm="devhub"', **_HEADERS})
    except HubError as error:
        return HTMLResponse(escape(error.message), error.status, _HEADERS)
    card = storage(request).text(commit.files, "README.md")
    return _page(str(found.id), [_summary(settings, commit), _files(found.id, commit), f"<pre>{escape(card)}</pre>"])


def _summary(settings: Settings, commit: Commit) -> str:
    words = [commit.oid, commit.date, commit.title, commit.author]
    words += ["private"] * settings.private + ["gated"] * bool(settings.gated)
    return f"<p>{escape(' · '.join(words))}</p>"


def _files(repo: RepoId, commit: Commit) -> str:
    rows = (
        f'<tr><td><a href="{repo.url_path}/resolve/{commit.oid}/{quote(path)}">{escape(path)}</a></td>'
        f"<td>{entry.size:,} bytes</td></tr>"
        for path, entry in commit.files.items()
    )
    return f"<table>{''.join(rows)}</table>"


def _page(title: str, parts: Iterable[str]) -> Response:
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    return HTMLResponse(f"{head}<h1>{escape(title)}</h1>{''.join(parts)}</html>", headers=_HEADERS)


routes = [
    route("/", index),
    *(
        route(f"{prefix}/{{repo}}{suffix}", repo)
        for prefix in ("/{kind}", "")
        for suffix in ("", "/tree/{revision}", "/commit/{revision}")
    ),
]
