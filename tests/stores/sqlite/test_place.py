"""A file that was moved or deleted is not written to any more, as its data would be lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.core.errors import StoreUnavailable
from gateway.stores.sqlite.place import FilesReplaced, StoreFiles
from tests.stores.files import CHARGE, KEY, MakeRecord, opened


@pytest.mark.parametrize("end", ["", "-wal", "-shm"])
async def test_store_is_unavailable_while_a_file_of_it_is_missing(path: Path, record: MakeRecord, end: str) -> None:
    file, aside = Path(f"{path}{end}"), path.with_name("aside")
    async with opened(path) as store:
        before = await store.settle(record(charge=CHARGE))
        file.rename(aside)
        with pytest.raises(StoreUnavailable, match="Restore them, or restart the gateway"):
            await store.ping()
        with pytest.raises(StoreUnavailable, match="deleted, moved or replaced"):
            await store.settle(record(charge=CHARGE))
        aside.rename(file)
        await store.ping()
        assert await store.totals(KEY) == before
        assert (await store.settle(record(charge=CHARGE))).calls == 2


async def test_a_folder_that_cannot_be_looked_into_is_said_to_be_one(path: Path, record: MakeRecord) -> None:
    folder, aside = path.parent, path.parent.with_name("aside")
    async with opened(path) as store:
        await store.settle(record(charge=CHARGE))
        # Not a folder without permissions: tests may run as root, which can read every folder.
        folder.rename(aside)
        folder.symlink_to(folder)
        with pytest.raises(StoreUnavailable, match=r"cannot be found any more, .+\. Give the gateway access"):
            await store.ping()
        folder.unlink()
        aside.rename(folder)
        await store.ping()
        assert (await store.settle(record(charge=CHARGE))).calls == 2


async def test_another_file_in_its_place_is_not_written_to_either(path: Path, record: MakeRecord) -> None:
    async with opened(path) as store:
        await store.settle(record(charge=CHARGE))
        other = path.with_name("other")
        other.write_bytes(b"")
        other.replace(path)
        with pytest.raises(StoreUnavailable, match="replaced"):
            await store.ping()
    assert path.read_bytes() == b""


def test_it_is_looked_at_now_and_again_and_each_time_once_something_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "gateway.db"
    file.write_bytes(b"")
    place = StoreFiles(file)
    file.unlink()
    place.check()
    for _ in range(2):
        with pytest.raises(FilesReplaced):
            place.check(at_once=True)
    with pytest.raises(FilesReplaced):
        place.check()
