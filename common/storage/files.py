"""Write files atomically: temporary file, fsync, rename. Digests of files. Locks on open files and folders (flock),
which the system releases when the process ends."""

import fcntl
import hashlib
import os
import re
import secrets
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from ..errors import DrivetrainError

_ROUND = 0.05  # seconds between two looks for a file


class LockError(DrivetrainError, OSError):
    """The file system has no locks."""


def acquire(file: IO[Any] | int, *, wait: bool = True, shared: bool = False) -> bool:
    """Lock an open file or folder; return whether this process holds the lock now. Closing it, or `release`, unlocks
    it. Raise LockError if the file system has no locks."""
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(file, kind if wait else kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        name = getattr(file, "name", file)
        with suppress(OSError):
            name = Path(f"/proc/self/fd/{file if isinstance(file, int) else file.fileno()}").readlink()
        raise LockError(
            f"{name} cannot be locked: {error.strerror or error}. Use a folder on a file system with locks (flock), "
            "such as a disk of this machine: cache= for data at an address, $DRIVETRAIN_DATA for all else."
        ) from error
    return True


def release(file: IO[Any] | int) -> None:
    """Unlock the file. Closing it does not suffice where a process forked in the meantime has it open, too."""
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_UN)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one process, or thread, at a time into the block; `path` is a lock file, which stays. Raise LockError where
    its file system has no locks."""
    with path.open("ab") as file:
        acquire(file)
        yield


@contextmanager
def exclusive_lock(path: Path, refusal: str) -> Iterator[None]:
    """Let one process, or thread, into the block; others raise a `DrivetrainError`, `refusal`, and do not wait. `path`
    is a lock file, which exists only inside the block. Without effect where its file system has no locks."""
    with path.open("ab") as file:
        with suppress(LockError):
            # One that ends between the two steps has removed the file, whose lock then keeps nobody out.
            if not (acquire(file, wait=False) and _is_at(file, path)):
                raise DrivetrainError(refusal)
        try:
            yield
        finally:
            with suppress(OSError):
                path.unlink()
            release(file)  # a process that was forked may have it open, too


def cache_folder() -> Path:
    """Return `$DRIVETRAIN_DATA`, else `$XDG_CACHE_HOME/drivetrain`, else `~/.cache/drivetrain`."""
    if chosen := os.environ.get("DRIVETRAIN_DATA"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "drivetrain"


def boot_id() -> str:
    """Return what distinguishes this start of the machine from others: a crash may lose what was written before."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def sync(path: Path) -> None:
    """Flush the file, or the entries of the folder, to disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_at(descriptor: int, data: bytes | memoryview, start: int) -> None:
    """Write all of `data` at a place of a file. `os.pwrite` writes a part, without an error, if the disk has no room
    for more."""
    rest = memoryview(data)
    while rest:
        written = os.pwrite(descriptor, rest, start)
        start, rest = start + written, rest[written:]


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def appears(path: Path, seconds: float) -> bool:
    """Return whether `path` exists, or another machine's process creates it within `seconds`."""
    deadline = time.monotonic() + seconds
    while not (there := path.exists()) and time.monotonic() < deadline:
        with suppress(OSError):
            os.listdir(path.parent)  # noqa: PTH208  makes NFS look again
        time.sleep(_ROUND)
    return there


def make_folder(folder: Path) -> Path:
    """Create the folder if missing, check that it is writable before time is spent on its contents, and return it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (FileExistsError, NotADirectoryError):
        raise DrivetrainError(f"{folder} cannot be a folder: it or one of its parents is a file.") from None
    except OSError as error:
        raise DrivetrainError(f"The folder {folder} is not writable: {error.strerror}.") from None
    return folder


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a binary file that appears at `path` when the block ends, and not at all if it fails. Of concurrent writers
    the last one to finish wins. A `DrivetrainError` names `path` if it cannot be written."""
    with atomic_files(path) as (file,):
        yield file


def write_file(path: Path, content: bytes | str) -> None:
    """Write a whole file as `atomic_file` does, a text in UTF-8."""
    with atomic_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def atomic_files(*paths: Path) -> Iterator[tuple[BinaryIO, ...]]:
    """Open binary files in one folder that appear in that order when the block ends, and not at all if it fails; the
    last one names the set. A process killed between two renames leaves new files next to old ones: readers verify."""
    with ExitStack() as stack:
        partials = []
        for path in paths:
            with _failure_names(path):
                partials.append(stack.enter_context(_partial_file(path)))
        with _failure_names(paths[-1]):
            yield tuple(file for _, file in partials)
        for path, (_, file) in zip(paths, partials, strict=True):  # all on disk before the first rename
            with _failure_names(path):
                file.flush()
                os.fsync(file.fileno())
        if len(paths) > 1:  # the files of concurrent writers are never mixed
            with _failure_names(paths[-1]):
                stack.enter_context(_turn(paths[-1]))
        with _failure_names(paths[-1]):  # now: a reader may rename the folder as soon as it sees the last file
            folder = os.open(paths[-1].parent, os.O_RDONLY)
            stack.callback(os.close, folder)
        for path, (temporary, _) in zip(paths, partials, strict=True):
            with _failure_names(path):
                temporary.replace(path)
        with _failure_names(paths[-1]):
            os.fsync(folder)


@contextmanager
def _failure_names(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DrivetrainError(f"{path} could not be written: {error.strerror or error}.") from error


@contextmanager
def _partial_file(path: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """Open a temporary file next to `path`, under a unique name; remove it at the end. Its writer holds a lock on it:
    an unlocked one was left by a killed writer, and is removed here."""
    _remove_leftovers(path)
    with ExitStack() as stack:
        while True:
            temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
            stack.callback(_remove, temporary)  # before it is there: Ctrl-C may come as soon as it is
            file = cast(BinaryIO, temporary.open("x+b"))
            stack.callback(_close, file)
            with suppress(OSError):
                acquire(file)
            if _is_at(file, temporary):  # else another writer removed it before it was locked
                break
        yield temporary, file


def _close(file: BinaryIO) -> None:
    with suppress(OSError):  # if it was renamed, it is on disk; otherwise the disk may be full
        file.close()


def _remove(temporary: Path) -> None:
    with suppress(OSError):  # it was renamed
        temporary.unlink()


def _remove_leftovers(path: Path) -> None:
    """Remove the temporary files of dead writers of `path`."""
    name = re.compile(rf"\.{re.escape(path.name)}\.\d+-[0-9a-f]{{8}}\.partial")
    with suppress(OSError), os.scandir(path.parent) as entries:
        leftovers = [Path(entry.path) for entry in entries if name.fullmatch(entry.name) and entry.is_file()]
        for leftover in leftovers:
            with suppress(OSError), leftover.open("r+b") as file:  # renamed, or of another user
                if acquire(file, wait=False):
                    leftover.unlink()


@contextmanager
def _turn(path: Path) -> Iterator[None]:
    """Serialize the writers of `path` by a lock file, which exists only inside the block."""
    place = _lock_file(path)
    while True:
        file = place.open("ab")
        with suppress(OSError):
            acquire(file)
        if _is_at(file, place):
            break
        file.close()  # the previous writer has removed it
    try:
        yield
    finally:
        with suppress(OSError):  # on file systems without locks, another writer may have removed it
            place.unlink()
        release(file)
        file.close()


def wait_for_renames(path: Path) -> None:
    """Wait until no writer of the set named by `path` (see `atomic_files`) is between two renames."""
    with suppress(OSError), _lock_file(path).open("rb") as file:  # no file: no writer
        acquire(file, shared=True)  # NFS locks what is open for reading in no other way


@contextmanager
def renames_held(path: Path) -> Iterator[None]:
    """Inside the block, no writer of the set named by `path` (see `atomic_files`) renames. Where no lock file can be
    created, as in a folder of somebody else, only the writer of this moment is waited for."""
    with ExitStack() as stack:
        try:
            stack.enter_context(_turn(path))
        except OSError:
            wait_for_renames(path)
        yield


def _lock_file(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")


def _is_at(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
