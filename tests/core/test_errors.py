"""Errors of the operating system become one sentence with the file, whichever library raises them."""

import errno
import os
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from ingot.core.errors import Notice, UserError, name_file, os_error_message, show_warning

NUMBERS = [
    *("ENOSPC", "EDQUOT", "EIO", "EROFS", "EACCES", "EPERM", "ENOLCK", "ENOSYS", "EOPNOTSUPP", "ESTALE"),
    *("EMFILE", "ENFILE", "ENAMETOOLONG", "ELOOP", "EISDIR", "ENOTDIR", "EFBIG", "EEXIST"),
    *("EBUSY", "ENXIO", "ENODEV", "ETIMEDOUT", "EXDEV"),
]


@pytest.mark.parametrize("name", NUMBERS)
def test_every_error_of_the_system_that_a_user_can_mend_has_a_sentence(name: str) -> None:
    number = getattr(errno, name)
    message = os_error_message(OSError(number, os.strerror(number), "/a/b"))
    assert message is not None
    assert message.startswith("/a/b: ")
    assert "; " in message, "what to do"
    assert "\n" not in message


FULL = "the disk is full; free space and run the same command again"
FOREIGN = {
    "safetensors": SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    "tokenizers": Exception("No space left on device (os error 28)"),
    "arrow": pa.ArrowException("Error writing bytes to file. Detail: [errno 28] No space left on device"),
    "C++": RuntimeError("[enforce fail at inline_container.cc:815] . write failed: No space left on device"),
    "zstd": pa.ArrowIOError(errno.ENOSPC, "Error writing bytes to file"),
}


@pytest.mark.parametrize("error", FOREIGN.values(), ids=FOREIGN)
def test_errors_of_libraries_are_recognised_and_get_the_name_of_the_file(error: Exception) -> None:
    assert os_error_message(error, "runs/x") == f"runs/x: {FULL}"
    with pytest.raises(OSError, match="No space") as caught, name_file("out/y"):
        raise error
    assert os_error_message(caught.value, "runs/x") == f"out/y: {FULL}"


def test_what_is_no_error_of_the_system_stays_what_it_is() -> None:
    for error in (KeyError("os"), ValueError("error 28"), SafetensorError("InvalidHeader"), OSError("no number")):
        assert os_error_message(error) is None
        with pytest.raises(type(error)), name_file("x"):
            raise error
    with pytest.raises(UserError, match="os error 28"), name_file("x"):
        raise UserError("os error 28")
    with pytest.raises(FileNotFoundError) as caught, name_file("x"):
        Path("nowhere").read_text()
    assert caught.value.filename == "nowhere"


def test_safetensors_in_a_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="Not a directory") as caught, name_file(tmp_path / "file/x"):
        save_file({"a": torch.zeros(3)}, tmp_path / "file/x")
    assert str(os_error_message(caught.value)).startswith(f"{tmp_path}/file/x: found a file on this path")


def test_a_notice_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    show_warning("a message", Notice, "file.py", 3)
    assert capsys.readouterr().err == "note: a message\n"
