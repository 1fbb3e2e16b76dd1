"""Whether a folder's files can only come from those who may run code here anyway."""

from __future__ import annotations

import os
import stat
from pathlib import Path

MAX_LINKS = 40
"""Symbolic links followed in one path, as the system's own limit."""


def who_else_writes(folder: Path) -> str | None:
    """Why files in a folder may be somebody else's; None if only this user and root make them.

    Looked at are the folder, what lies in it and in its folders, and every folder and symbolic link
    on the path to it: whoever may rename one of these chooses what is found at its end. A folder
    above it may be open to all if it is sticky, as /tmp is. A group counts as this user alone if it
    is root's, or the user's own by name and without other members. Systems that have no owners of
    files are not asked.

    Args:
        folder: an existing folder.

    Raises:
        OSError: something on the path cannot be looked at.
    """
    if not hasattr(os, "geteuid"):
        return None
    why = _on_the_path(folder)
    if why is not None:
        return why
    for parent, names, files in os.walk(folder):
        for path in [parent, *(os.path.join(parent, name) for name in (*names, *files))]:
            try:
                state = os.lstat(path)
            except FileNotFoundError:
                continue  # another process has cleaned up
            why = _why_not(path, state, sticky_is_enough=False)
            if why is not None:
                return why
    return None


def _on_the_path(folder: Path) -> str | None:
    """As `who_else_writes`, of the folders and links that lead to a folder."""
    left = list(folder.absolute().parts[1:])
    at, num_links = Path("/"), 0
    while True:
        state = os.lstat(at)
        if stat.S_ISLNK(state.st_mode):
            num_links += 1
            if num_links > MAX_LINKS:
                raise OSError(f"{folder} has too many symbolic links on its path")
            if not _is_trusted(state.st_uid):
                return f"{at} is a link of user {state.st_uid}"
            target = at.parent / os.readlink(at)
            left = [*target.parts[1:], *left]
            at = Path("/")
            continue
        why = _why_not(str(at), state, sticky_is_enough=True)
        if why is not None:
            return why
        if not left:
            return None
        name = left.pop(0)
        at = at.parent if name == ".." else at / name


def _why_not(path: str, state: os.stat_result, *, sticky_is_enough: bool) -> str | None:
    if not _is_trusted(state.st_uid):
        return f"{path} belongs to user {state.st_uid}"
    mode = state.st_mode
    if stat.S_ISLNK(mode) or (sticky_is_enough and mode & stat.S_ISVTX):
        return None  # a link's mode says nothing; in a sticky folder, owners alone rename
    if mode & stat.S_IWOTH:
        return f"everybody may write to {path}"
    if mode & stat.S_IWGRP and not _is_own_group(state.st_gid):
        return f"group {state.st_gid} may write to {path}"
    return None


def _is_trusted(user: int) -> bool:
    return user in (0, os.geteuid())


def _is_own_group(group: int) -> bool:
    """Whether a group has no members but this user and root."""
    import grp
    import pwd

    if group == 0:
        return True
    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    is_private = group == user.pw_gid and found.gr_name == user.pw_name
    return is_private and set(found.gr_mem) <= {user.pw_name}
