"""Reads tables of nodes and edges, CSV or Parquet, so that whatever is wrong with a file is told with its place.

Not here: what the columns mean and how they become a graph (`frames.py`).
"""

from __future__ import annotations

import csv
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_SUFFIXES = (*_SEPARATORS, ".parquet")


@dataclass(frozen=True, eq=False)
class Table:
    """A frame, and how a message calls its rows.

    Attributes:
        frame: rows numbered from 0; columns are distinct, non-empty strings.
        source: the file, or what else it is.
        separator: of a text file, whose rows are called by their line; None for anything else.
        rows: what to call the rows instead of by their number.
    """

    frame: pd.DataFrame
    source: str
    separator: str | None = None
    rows: Sequence[object] | None = None

    def at(self, row: int, column: str | None = None) -> str:
        """The place of a row, or of a cell: `nodes.csv, line 4, column 'age'`."""
        where = f"row {row} (counted from 0)" if self.rows is None else f"row {self.rows[row]!r}"
        if self.separator is not None:
            where = f"line {_line_of(Path(self.source), self.separator, row)}"
        return f"{self.source}, {where}" + ("" if column is None else f", column {column!r}")


def read_table(path: Path, *, text: Sequence[str], separator: str | None = None) -> Table:
    """The table in a `.csv`, `.tsv` or `.parquet` file.

    A text file is UTF-8 with the names of its columns in the first line. Cells are kept as they are written: nothing
    but an empty cell means that there is no value, so that `NA` can be an id. In Parquet a named index is a column.

    Args:
        text: columns of a text file that are read as text whatever they look like.
        separator: of a text file; a comma for `.csv` and a tab for `.tsv` if None.

    Raises:
        ValueError: one line with the file, where in it, and what to change.
    """
    suffix = path.suffix.lower()
    if suffix not in _SUFFIXES:
        raise ValueError(f"{path} is not called {', '.join(_SUFFIXES)}; export the table as one of these")
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise ValueError(f"cannot read the table {path}: {error.strerror}; change data.nodes or data.edges") from None
    if suffix == ".parquet":
        return _read_parquet(path)
    return _read_text(path, text, _SEPARATORS[suffix] if separator is None else separator)


def _read_parquet(path: Path) -> Table:
    try:
        frame = pd.read_parquet(path)
    except Exception as error:  # a damaged file fails anywhere in pyarrow or pandas
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{path} is no Parquet file that can be read ({reason}); write it again") from None
    if any(name is not None for name in frame.index.names):
        frame = frame.reset_index(allow_duplicates=True)  # a name that comes twice is refused below
    frame.columns = _checked_names(path, [str(name) for name in frame.columns])
    return Table(without_categories(frame.reset_index(drop=True)), str(path))


def without_categories(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with the values of its categorical columns."""
    found = [name for name, dtype in frame.dtypes.items() if isinstance(dtype, pd.CategoricalDtype)]
    return frame.astype(dict.fromkeys(found, object))


def _read_text(path: Path, text: Sequence[str], separator: str) -> Table:
    try:
        header = next((record for _, record in _records(path, separator)), None)
        if header is None:
            raise ValueError(f"{path} is empty; its first line names the columns")
        names = _checked_names(path, [name.strip() for name in header])
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # pandas would drop what is too long
            frame = pd.read_csv(
                path,
                sep=separator,
                header=0,
                names=names,
                index_col=False,
                dtype={name: str for name in text if name in names},
                keep_default_na=False,
                encoding="utf-8-sig",
                low_memory=False,
            )
    except UnicodeDecodeError:
        raise ValueError(_not_utf8(path)) from None
    except (pd.errors.ParserError, pd.errors.ParserWarning, csv.Error) as error:
        _check_form(path, separator)
        raise ValueError(f"{path} is no table that can be read: {' '.join(str(error).split())}") from None
    last = frame[names[-1]]
    if not pd.api.types.is_numeric_dtype(last) and (last == "").any():
        _check_form(path, separator)  # pandas takes a row that ends early for one with empty cells
    return Table(frame, str(path), separator)


def _records(path: Path, separator: str, strict: bool = False) -> Iterator[tuple[int, list[str]]]:
    """(line, cells) of every record; empty lines are none."""
    with path.open(encoding="utf-8-sig", newline="") as stream:
        reader = csv.reader(stream, delimiter=separator, strict=strict)
        before = 0
        for record in reader:
            line, before = before + 1, reader.line_num
            if record and not (len(record) == 1 and record[0].isspace()):
                yield line, record


def _line_of(path: Path, separator: str, row: int) -> int:
    """The line on which a row begins: quoted cells can go over several, empty lines are no rows."""
    return next((line for count, (line, _) in enumerate(_records(path, separator)) if count == row + 1), row + 2)


def _checked_names(path: Path, names: list[str]) -> list[str]:
    for number, name in enumerate(names, start=1):
        if not name.strip():
            raise ValueError(
                f"{path}: column {number} has no name; name it, or remove it if it only counts the rows (pandas: "
                "to_csv(index=False)) or a separator ends every line"
            )
        if name in names[: number - 1]:
            raise ValueError(f"{path}: column {name!r} comes twice; rename or remove one of them")
    return names


def _check_form(path: Path, separator: str) -> None:
    """Raise for the first record that has not as many cells as there are columns, or whose quote is never closed."""
    wanted, line = 0, 0
    try:
        for line, record in _records(path, separator, strict=True):
            wanted = wanted or len(record)
            if len(record) != wanted:
                raise ValueError(
                    f"{path}, line {line}: {len(record)} values for {wanted} columns; a value with {separator!r} in it "
                    "needs quotes, an empty one its separator"
                )
    except csv.Error as error:
        raise ValueError(f"{path}, after line {line}: {error}; check the quotes there") from None


def _not_utf8(path: Path) -> str:
    data = path.read_bytes()
    try:
        data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        return f"{path}, line {line}: byte {data[error.start]:#04x} is not UTF-8; save the file as UTF-8 text"
    raise AssertionError("it was UTF-8 after all")
