"""The JSON the client parses, made from what is stored; asks nothing about access."""

import hashlib
import html
import json
from collections.abc import Iterable, Mapping
from typing import Any

from devhub.accounts import Account
from devhub.card import check_card
from devhub.names import RepoId
from devhub.repository import Commit, Refs, Settings
from devhub.sendable import is_sendable
from devhub.storage import HubStorage
from devhub.tree import Entry, Files, folder_oid, lfs_pointer


def whoami(account: Account) -> dict[str, Any]:
    return {
        "type": "user",
        "id": _stable_id(account.name),
        "name": account.name,
        "fullname": account.name,
        "isPro": False,
        "orgs": [
            {"type": "org", "id": _stable_id(org), "name": org, "fullname": org, "roleInOrg": "write"}
            for org in account.orgs
        ],
        "auth": {"type": "access_token", "accessToken": {"displayName": "devhub", "role": account.role}},
    }


def repo_info(
    storage: HubStorage, repo: RepoId, settings: Settings, commit: Commit, *, with_blobs: bool
) -> dict[str, Any]:
    """What model_info and dataset_info ask for.

    with_blobs  add size, git id and LFS data to the siblings
    """
    card = check_card(storage.text(commit.files, "README.md")).data
    info: dict[str, Any] = {
        "_id": _stable_id(str(repo)),
        "id": repo.name,
        "author": repo.owner,
        "sha": commit.oid,
        "createdAt": settings.created_at,
        "lastModified": commit.date,
        "private": settings.private,
        "gated": settings.gated,
        "disabled": False,
        "downloads": 0,
        "likes": 0,
        "tags": _tags(card),
        "siblings": [_sibling(path, entry, with_blobs) for path, entry in commit.files.items()],
        "usedStorage": sum(entry.size for entry in commit.files.values()),
    }
    if card:
        info["cardData"] = card
    if repo.kind == "models":
        info |= {"modelId": repo.name, "config": _config(storage, commit.files)}
        info |= {key: card[key] for key in ("library_name", "pipeline_tag") if isinstance(card.get(key), str)}
    return info


def expanded(info: Mapping[str, Any], wanted: Iterable[str]) -> dict[str, Any]:
    """Only the asked-for properties, besides the ids that always come."""
    return {key: value for key, value in info.items() if key in {"_id", "id", *wanted}}


def tree_item(files: Files, path: str, entry: Entry | None, last: Commit | None) -> dict[str, Any]:
    """One line of a listing.

    entry  None for a folder
    last   the commit that changed it last, for `expand`
    """
    item: dict[str, Any] = {"type": "file" if entry else "directory", "path": path}
    if entry is None:
        item |= {"oid": folder_oid(files, path), "size": 0}
    else:
        item |= {"oid": entry.oid, "size": entry.size}
        if entry.sha256:
            item["lfs"] = {"oid": entry.sha256, **_lfs_sizes(entry)}
    if last is not None:
        item["lastCommit"] = {"id": last.oid, "title": last.title, "date": last.date}
    return item


def refs(stored: Refs) -> dict[str, Any]:
    return {
        "branches": _ref_list("heads", stored.branches),
        "converts": [],
        "tags": _ref_list("tags", stored.tags),
        "pullRequests": [],
    }


def commit_item(commit: Commit, *, formatted: bool) -> dict[str, Any]:
    item: dict[str, Any] = {
        "id": commit.oid,
        "title": commit.title,
        "message": commit.message,
        "authors": [{"user": commit.author}],
        "date": commit.date,
    }
    if formatted:
        item["formatted"] = {"title": html.escape(commit.title), "message": html.escape(commit.message)}
    return item


def _sibling(path: str, entry: Entry, with_blobs: bool) -> dict[str, Any]:
    sibling: dict[str, Any] = {"rfilename": path}
    if with_blobs:
        sibling |= {"size": entry.size, "blobId": entry.oid}
        if entry.sha256:
            sibling["lfs"] = {"sha256": entry.sha256, **_lfs_sizes(entry)}
    return sibling


def _lfs_sizes(entry: Entry) -> dict[str, int]:
    return {"size": entry.size, "pointerSize": len(lfs_pointer(entry.sha256 or "", entry.size))}


def _ref_list(folder: str, table: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"name": n, "ref": f"refs/{folder}/{n}", "targetCommit": oid} for n, oid in sorted(table.items())]


def _tags(card: Mapping[str, Any]) -> list[str]:
    tags = [tag for tag in card.get("tags") or [] if isinstance(tag, str)]
    if isinstance(card.get("library_name"), str):
        tags.append(card["library_name"])
    for key in ("license", "base_model"):
        values = card.get(key)
        tags += [f"{key}:{value}" for value in ([values] if isinstance(values, str) else values or [])]
    return list(dict.fromkeys(tags))


def _config(storage: HubStorage, files: Files) -> dict[str, Any]:
    """The two lines of config.json the Hub shows; empty when it is missing or no JSON object."""
    try:
        config = json.loads(storage.text(files, "config.json") or "{}")
    except (ValueError, RecursionError):
        return {}
    wanted = ("architectures", "model_type")
    if not isinstance(config, dict):
        return {}
    return {key: config[key] for key in wanted if key in config and is_sendable(config[key])}


def _stable_id(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:24]
