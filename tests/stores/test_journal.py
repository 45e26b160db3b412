"""What a journal took survives its worker, is read once it has no owner, and half a line harms nothing."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.core.ledger.arithmetic import Amount
from gateway.core.record import ORPHANED, CallRecord
from gateway.stores.journal import Journal, Left

MakeRecord = Callable[..., CallRecord]


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.journal"))


def holds_something(file: Path) -> bool:
    try:
        return file.stat().st_size > 0
    except FileNotFoundError:
        return False


def read(folder: Path) -> list[CallRecord]:
    """What a journal of another worker finds."""
    return [record for left in Journal(folder).left_over() for record in read_file(left)]


def read_file(left: Left) -> list[CallRecord]:
    return [record for part in left.parts(64) for record in part]


def test_appended_records_are_found_after_the_worker_ended(tmp_path: Path, record: MakeRecord) -> None:
    journal, records = Journal(tmp_path / "new" / "folder"), [record(), record("t")]
    for one in records:
        journal.append(one)
    assert read(tmp_path / "new" / "folder") == [], "its worker still lives"
    journal.close()
    assert read(tmp_path / "new" / "folder") == records


def test_deleted_file_is_written_again_with_the_next_record(tmp_path: Path, record: MakeRecord) -> None:
    folder = tmp_path / "folder"
    journal, records = Journal(folder), [record() for _ in range(3)]
    for one in records[:2]:
        journal.append(one)
    shutil.rmtree(folder)
    journal.append(records[2])
    journal.close()
    assert read(folder) == records


def test_deleted_file_is_written_again_when_its_worker_leaves_it(tmp_path: Path, record: MakeRecord) -> None:
    folder = tmp_path / "folder"
    journal, records = Journal(folder), [record() for _ in range(2)]
    for one in records:
        journal.append(one)
    shutil.rmtree(folder)
    journal.close()
    assert read(folder) == records


def test_deleted_file_of_refused_records_is_written_again(tmp_path: Path, record: MakeRecord) -> None:
    folder = tmp_path / "folder"
    journal, records = Journal(folder), [record() for _ in range(2)]
    journal.set_aside(records[0])
    shutil.rmtree(folder)
    path = journal.set_aside(records[1])
    assert read_file(Left(path)) == records


def test_unwritable_folder_is_known_before_the_first_write(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "journals"
    obstacle = Journal(folder).write_warning()
    assert obstacle is not None
    assert obstacle.startswith(f"the journal {folder} cannot be written, as {tmp_path / 'file'} is not a folder. ")
    assert "store.journal" in obstacle
    for good in (tmp_path, tmp_path / "new" / "folder", Path("new")):
        assert Journal(good).write_warning() is None
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "nothing is made to look"


def test_only_journals_in_folders_of_other_stores_are_reported(tmp_path: Path, record: MakeRecord) -> None:
    ours, left, running, *odd = (tmp_path / name for name in ("0" * 12, "a" * 12, "b" * 12, "other", "c" * 11))
    assert Journal(ours).other_stores_warning() is None
    journals = [Journal(folder) for folder in (ours, left, running, *odd)]
    for journal in journals:
        journal.append(record())
    for journal in journals:
        if journal is not journals[2]:
            journal.close()
    told = Journal(ours).other_stores_warning()
    assert told is not None
    assert f"of other stores: {left}. " in told
    assert f"to {ours};" in told
    assert Journal(odd[0]).other_stores_warning() is None, "it is no folder of one store among others"
    assert len(read(left)) == 1, "it is left as it is"


def test_journal_file_is_private_to_its_owner(tmp_path: Path, record: MakeRecord) -> None:
    journal = Journal(tmp_path)
    journal.append(record())
    (file,) = files(tmp_path)
    assert file.stat().st_mode & 0o077 == 0


def test_clearing_deletes_the_file(tmp_path: Path, record: MakeRecord) -> None:
    journal = Journal(tmp_path)
    journal.append(record())
    journal.clear()
    journal.clear()
    assert files(tmp_path) == []
    journal.append(record())
    assert len(files(tmp_path)) == 1


def test_new_file_never_overwrites_a_waiting_one(tmp_path: Path, record: MakeRecord) -> None:
    first = Journal(tmp_path)
    for _ in range(3):
        first.append(record())
        first.close()
    assert len(files(tmp_path)) == 3
    assert len(read(tmp_path)) == 3


@pytest.mark.parametrize("cut", [2, 5, 9, 40, 200])
def test_incomplete_last_line_is_left_out_and_earlier_ones_are_read(
    tmp_path: Path, record: MakeRecord, cut: int
) -> None:
    journal, whole = Journal(tmp_path), record()
    journal.append(whole)
    journal.append(record())
    journal.close()
    (file,) = files(tmp_path)
    os.truncate(file, file.stat().st_size - cut)
    assert read(tmp_path) == [whole]


def test_damaged_line_hides_no_other(tmp_path: Path, record: MakeRecord) -> None:
    journal, first, last = Journal(tmp_path), record(), record()
    for one in (first, record(), last):
        journal.append(one)
    journal.close()
    (file,) = files(tmp_path)
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0] + lines[1].replace(b'"call_id"', b'"call_ix"') + b"\xff nonsense\n\n" + lines[2])
    assert read(tmp_path) == [first, last]


@pytest.mark.parametrize("place", [0, 1])
def test_a_file_with_a_line_that_was_damaged_is_set_aside_and_not_deleted(
    tmp_path: Path, record: MakeRecord, place: int, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(tmp_path)
    for _ in range(2):
        journal.append(record())
    journal.close()
    (file,) = files(tmp_path)
    lines = file.read_bytes().splitlines(keepends=True)
    lines[place] = lines[place].replace(b'"call_id"', b'"call_ix"')
    file.write_bytes(b"".join(lines))
    for left in Journal(tmp_path).left_over():
        assert len(read_file(left)) == 1
        left.delete()
    assert file.with_suffix(".unread").read_bytes() == b"".join(lines), "it is a charge that somebody may read"
    assert files(tmp_path) == []
    assert "damaged" in caplog.text


def test_a_long_file_is_read_in_parts(tmp_path: Path, record: MakeRecord) -> None:
    records = [record() for _ in range(5)]
    journal = Journal(tmp_path)
    for one in records:
        journal.append(one)
    journal.close()
    (parts,) = [list(left.parts(2)) for left in Journal(tmp_path).left_over()]
    assert parts == [records[:2], records[2:4], records[4:]]


def test_file_is_read_by_one_worker_at_a_time_and_deleted_when_settled(tmp_path: Path, record: MakeRecord) -> None:
    journal = Journal(tmp_path)
    journal.append(record())
    journal.close()
    for left in Journal(tmp_path).left_over():
        assert read(tmp_path) == []
        left.delete()
    assert files(tmp_path) == []


def test_full_disk_raises_and_leaves_no_half_line(tmp_path: Path, record: MakeRecord) -> None:
    journal, first, last = Journal(tmp_path), record(), record()
    journal.append(first)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (files(tmp_path)[0].stat().st_size + 100, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            journal.append(record())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    journal.append(last)
    journal.close()
    assert read(tmp_path) == [first, last]


def test_folder_that_cannot_be_made_raises(record: MakeRecord) -> None:
    with pytest.raises(OSError, match=r"Not a directory|File exists|Permission"):
        Journal(Path("/dev/null/journal")).append(record())


def test_journal_survives_a_kill(tmp_path: Path) -> None:
    script = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parent.parent.parent)!r})
from pathlib import Path
from tests.stores.conftest import _TEMPLATE
from gateway.stores.journal import Journal
Journal(Path({str(tmp_path)!r})).append(_TEMPLATE)
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", script], check=False)
    assert len(read(tmp_path)) == 1


def test_notes_replace_the_last_ones_and_are_found_after_the_worker_ended(tmp_path: Path, record: MakeRecord) -> None:
    journal, ended, under_way = Journal(tmp_path), record(), record("t", outcome=ORPHANED)
    journal.append(ended)
    for tokens in range(1, 50):
        noted = replace(under_way, spent=Amount(tokens))
        journal.note([noted, replace(noted, call_id=f"other-{tokens}")])
    assert len(files(tmp_path)) == 2
    assert read(tmp_path) == [], "its worker still lives"
    assert [*journal.left_over()] == []
    journal.close()
    assert read(tmp_path) == [ended, noted, replace(noted, call_id="other-49")]
    assert [path.stat().st_mode & 0o777 for path in files(tmp_path)] == [0o600] * 2


def test_empty_notes_delete_the_file(tmp_path: Path, record: MakeRecord) -> None:
    journal = Journal(tmp_path)
    journal.note([])
    assert files(tmp_path) == []
    journal.note([record()])
    journal.note([])
    assert files(tmp_path) == []
    journal.close()


def test_failed_notes_keep_the_last_ones(tmp_path: Path, record: MakeRecord) -> None:
    journal, one = Journal(tmp_path), record(outcome=ORPHANED)
    journal.note([one])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            journal.note([replace(one, spent=Amount(9))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(files(tmp_path)) == 1
    journal.close()
    assert read(tmp_path) == [one]


def test_last_of_several_journaled_records_of_a_call_is_read(tmp_path: Path, record: MakeRecord) -> None:
    journal, real = Journal(tmp_path), record()
    less, more = (replace(real, outcome=ORPHANED, spent=Amount(tokens)) for tokens in (5, 9))
    for records in ((less, more), (more, less), (less, real, more)):
        for one in records:
            journal.append(one)
        journal.close()
        assert read(tmp_path) == [max(records, key=lambda one: (one is real, one.spent.tokens))]
        for path in files(tmp_path):
            path.unlink()


def test_new_file_is_not_treated_as_left_over(tmp_path: Path, record: MakeRecord) -> None:
    journal, looks_on = Journal(tmp_path), threading.Event()

    def look() -> None:
        """As other workers do, but without a pause."""
        while not looks_on.is_set():
            for left in Journal(tmp_path).left_over():
                left.delete()

    looking = [threading.Thread(target=look) for _ in range(2)]
    for one in looking:
        one.start()
    try:
        for _ in range(300):
            journal.append(record())
            # Another file may be there for a moment: one that was given up as a looker had taken it, and is empty.
            assert any(map(holds_something, files(tmp_path))), "what was written down is nowhere to be found"
            journal.clear()
    finally:
        looks_on.set()
        for one in looking:
            one.join()


def test_a_record_of_another_version_is_set_aside_and_not_deleted(tmp_path: Path) -> None:
    value = b'{"call_id": 5}'
    (tmp_path / "1.journal").write_bytes(b"%08x %b\n" % (zlib.crc32(value), value))
    for left in Journal(tmp_path).left_over():
        assert read_file(left) == []
        left.delete()
    assert [path.name for path in tmp_path.iterdir()] == ["1.unread"]


def test_entry_that_is_not_a_file_does_not_block_others(tmp_path: Path, record: MakeRecord) -> None:
    (tmp_path / "0.journal").mkdir()
    journal = Journal(tmp_path)
    journal.append(record())
    journal.close()
    assert len(read(tmp_path)) == 1


def test_file_of_refused_records_is_private_and_read_after_it_is_renamed(tmp_path: Path, record: MakeRecord) -> None:
    journal, records = Journal(tmp_path), [record(), record("t")]
    (aside,) = {journal.set_aside(one) for one in records}
    assert aside.stat().st_mode & 0o077 == 0
    journal.append(record())
    journal.clear()
    assert read(tmp_path) == []
    aside.rename(aside.with_suffix(".journal"))
    assert read(tmp_path) == [], "its worker still writes to it"
    journal.close()
    assert read(tmp_path) == records
    assert journal.set_aside(records[0]) != aside
    journal.close()


def test_a_file_that_could_not_be_deleted_is_found_by_others(tmp_path: Path, record: MakeRecord) -> None:
    journal, one = Journal(tmp_path / "journals"), record()
    journal.append(one)
    (file,) = files(tmp_path / "journals")
    moved = file.rename(tmp_path / "moved")
    file.mkdir()
    with pytest.raises(OSError, match=r"."):
        journal.clear()
    file.rmdir()
    moved.rename(file)
    assert read(tmp_path / "journals") == [one], "nobody holds it any more"
