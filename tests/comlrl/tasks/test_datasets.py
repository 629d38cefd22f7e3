"""Tasks from files, folders, parquet and the builtin; slices; rows that cannot be used."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from comlrl.builtin import COOPMINI
from comlrl.config.sections import DatasetConfig
from comlrl.errors import UserError
from comlrl.rewards.code.domain import CODE
from comlrl.tasks.datasets import _unique, apart, load_tasks, split_size


def rows(count: int) -> list[dict]:
    return [
        {
            "task_id": f"T/{i}",
            "prompt": f"def f{i}(x):\n    '''Adds {i}.'''\n",
            "test": f"def check(candidate):\n    assert candidate(1) == {i + 1}\n",
            "entry_point": f"f{i}",
            "level": i,
        }
        for i in range(count)
    ]


def jsonl(folder: Path, items: list[dict], name: str = "test.jsonl") -> str:
    file = folder / name
    file.write_text("".join(json.dumps(item) + "\n" for item in items))
    return str(file)


def ids(name: str, split: str, **keys) -> list[str]:
    return [task.task_id for task in load_tasks(DatasetConfig(name=name, **keys), split, CODE)]


@pytest.mark.parametrize(("name", "count"), [("HumanEval", 164), ("CoopHumanEval", 82)])
def test_real_problems(shared_data, name, count):
    file = shared_data / f"{name}.jsonl"
    tasks = load_tasks(DatasetConfig(name=str(file)), "test", CODE)
    assert [task.fields for task in tasks] == [json.loads(line) for line in file.open()]
    assert len({task.task_id for task in tasks}) == count


def test_published_slices_of_real_problems(shared_data):
    file = str(shared_data / "HumanEval.jsonl")
    assert ids(file, "test[33:163]") == [f"HumanEval/{i}" for i in range(33, 163)]
    assert ids(file, "test[:32]") == [f"HumanEval/{i}" for i in range(32)]
    assert len(ids(str(shared_data / "CoopHumanEval.jsonl"), "test[16:]")) == 82 - 16


@pytest.mark.parametrize("count", [1, 2, 30, 49, 50, 51, 149, 150, 1000])
def test_percent_from_the_end(count, tmp_path):
    """The two sides of a boundary share the rows, and the last side has its share, rounded."""
    file = jsonl(tmp_path, rows(count))
    every = [f"T/{i}" for i in range(count)]
    for percent in (1, 2, 5, 33, 99, 100):
        last = round(count * percent / 100)
        for split, wanted in (
            (f"test[-{percent}%:]", every[count - last :]),
            (f"test[:-{percent}%]", every[: count - last]),
        ):
            if wanted:
                assert ids(file, split) == wanted
            else:
                with pytest.raises(UserError, match="is empty"):
                    ids(file, split)
    twice = ids(file, "test[-100%:]+test[-100%:]")
    assert len(twice) == 2 * count


@pytest.mark.parametrize("split", ["test[:150%]", "test[-150%:]", "test[:9999999]", "test[-99:]"])
def test_slices_beyond_the_rows(split, tmp_path):
    """Either all rows that there are, or one line."""
    file = jsonl(tmp_path, rows(3))
    try:
        assert ids(file, split) == [f"T/{i}" for i in range(3)]
    except UserError as error:
        assert "dataset" in str(error)


@pytest.fixture
def sources(tmp_path) -> dict[str, str]:
    """The same six rows in every form that a dataset may have."""
    import pandas

    items = rows(6)
    folder = tmp_path / "folder"
    folder.mkdir()
    jsonl(folder, items)
    pandas.DataFrame(items).to_parquet(tmp_path / "test.parquet")
    (tmp_path / "test.json").write_text(json.dumps(items))
    return {
        "jsonl": jsonl(tmp_path, items),
        "json": str(tmp_path / "test.json"),
        "parquet": str(tmp_path / "test.parquet"),
        "folder": str(folder),
    }


@pytest.mark.parametrize(
    ("split", "chosen"),
    [
        ("test", [0, 1, 2, 3, 4, 5]),
        ("test[:2]", [0, 1]),
        ("test[4:]", [4, 5]),
        ("test[1:3]", [1, 2]),
        ("test[-2:]", [4, 5]),
        ("test[:-4]", [0, 1]),
        ("test[:50%]", [0, 1, 2]),
        ("test[:1]+test[5:]", [0, 5]),
    ],
)
def test_slices_are_alike_for_every_form(sources, split, chosen):
    for form, source in sources.items():
        assert ids(source, split) == [f"T/{i}" for i in chosen], form


def test_the_builtin_is_sliced_alike():
    everything = [json.loads(line)["task_id"] for line in COOPMINI["train"].open()]
    assert ids("builtin:coopmini", "train[3:7]") == everything[3:7]
    assert ids("builtin:coopmini", "train") == everything


def test_all_columns_are_kept(sources):
    for form, source in sources.items():
        assert load_tasks(DatasetConfig(name=source), "test[3:4]", CODE)[0].fields == rows(6)[3], (
            form
        )


def test_names_are_made_where_there_are_none_and_made_unique(tmp_path):
    items = rows(4)
    del items[0]["task_id"]
    items[2]["task_id"] = items[3]["task_id"] = "T/1"
    assert ids(jsonl(tmp_path, items), "test") == ["row_0", "T/1", "T/1#2", "T/1#3"]


def test_a_name_of_zero_is_a_name(tmp_path):
    items = [row | {"task_id": i} for i, row in enumerate(rows(2))]
    assert ids(jsonl(tmp_path, items), "test") == ["0", "1"]


def test_numbers_of_equal_names_are_tried_once():
    class Name(str):
        tried = 0

        def __format__(self, spec):
            Name.tried += 1
            return str(self)

    names = _unique([*["a"] * 2, "a#3", *map(Name, "b" * 50), "a"])
    assert names == ["a", "a#2", "a#3", "b", *(f"b#{n}" for n in range(2, 51)), "a#4"]
    assert Name.tried == 49


def unnamed(count: int) -> list[dict]:
    return [{k: v for k, v in row.items() if k != "task_id"} for row in rows(count)]


def test_rows_are_numbered_by_their_place_in_the_file(tmp_path):
    file = jsonl(tmp_path, unnamed(8))
    assert ids(file, "test[:2]") == ["row_0", "row_1"]
    assert ids(file, "test[6:8]") == ["row_6", "row_7"]
    assert ids(file, "test[-1:]+test[1:2]") == ["row_7", "row_1"]
    items = rows(4)
    items[3]["task_id"] = items[0]["task_id"]
    assert ids(jsonl(tmp_path, items), "test[3:]") == ["T/0#2"]  # whatever else is taken


def test_rows_of_two_files_of_a_folder_have_different_names(tmp_path):
    jsonl(tmp_path, unnamed(1), "train.jsonl")
    jsonl(tmp_path, unnamed(1), "test.jsonl")
    assert ids(str(tmp_path), "train") + ids(str(tmp_path), "test") == ["train_row_0", "test_row_0"]


def test_a_bad_row_is_named_by_its_line_whatever_is_sliced(tmp_path):
    file = tmp_path / "test.jsonl"
    items = [json.dumps(item) for item in unnamed(3)]
    file.write_text("\n".join([items[0], "", items[1], json.dumps({"prompt": "x"})]) + "\n")
    with pytest.raises(UserError, match=r"split 'test\[1:\]': line 4 \('row_2'\): "):
        ids(str(file), "test[1:]")


def test_held_out_tasks_never_have_the_name_of_another_training_task(tmp_path):
    training = load_tasks(DatasetConfig(name=jsonl(tmp_path, rows(3))), "test", CODE)
    others = [row | {"task_id": f"T/{i}"} for i, row in enumerate(rows(5)[2:])]
    held_out = load_tasks(DatasetConfig(name=jsonl(tmp_path, others)), "test", CODE)
    named, shared = apart(held_out, training)
    assert [task.task_id for task in named] == ["T/0#2", "T/1#2", "T/2#2"]
    assert shared == ["T/0"]  # T/2 of training, under another name
    same, shared = apart(training[1:], training)
    assert list(same) == training[1:] and shared == ["T/1", "T/2"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "contains no rows"),
        ("\n\n", "contains no rows"),
        ('{"a": 1}\n{"a": \n', "line 2, column 7: "),
        ('{"a": 1}\n[2]\n', "line 2 is not a JSON object"),
        ('[{"a": 1},\n {"a" 2}]', "line 2, column 7: "),
        ("[]", "contains no rows"),
        ("\xff", "is not UTF-8"),
    ],
)
@pytest.mark.parametrize("within", ["file", "folder"])
def test_broken_json_is_named_by_its_line(tmp_path, text, named, within):
    file = tmp_path / "test.jsonl"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError) as error:
        ids(str(file if within == "file" else tmp_path), "test")
    line = str(error.value)
    assert "\n" not in line and str(file) in line and named in line


def test_a_deep_row_is_named_by_its_line(tmp_path):
    file = tmp_path / "test.jsonl"
    file.write_text('{"a": 1}\n{"a": ' + "[" * 900 + "]" * 900 + "}\n")
    with pytest.raises(UserError, match=r"test\.jsonl' line 2: "):
        ids(str(file), "test")


BAD = [
    ({"prompt": None}, "prompt"),
    ({"prompt": "  "}, "prompt"),
    ({"entry_point": 3}, "entry_point"),
    ({"entry_point": "g"}, "`def g(…):`"),
    ({"test": "def check(candidate):\n    assert candidate("}, "its test does not compile"),
    ({"test": "def verify(candidate):\n    assert candidate(1)"}, "defines no `check"),
]


@pytest.mark.parametrize(("change", "named"), BAD, ids=lambda value: str(value))
def test_a_bad_row_is_named_or_skipped(tmp_path, capsys, change, named):
    items = rows(3)
    items[1] |= change
    items = [item | {"entry_point": str(item["entry_point"])} for item in items]
    if change.get("entry_point") == 3:
        items[1].pop("entry_point")
    file = jsonl(tmp_path, items)
    with pytest.raises(UserError) as error:
        load_tasks(DatasetConfig(name=file), "test", CODE)
    line = str(error.value)
    assert "\n" not in line and named in line and "on_bad_row=skip" in line
    assert line.startswith(f"dataset.name: '{file}' split 'test': line 2 ('T/1'): ")
    kept = load_tasks(DatasetConfig(name=file, on_bad_row="skip"), "test", CODE)
    assert [task.task_id for task in kept] == ["T/0", "T/2"]
    printed = capsys.readouterr()
    assert not printed.out and printed.err.count("\n") == 1 and named in printed.err


@pytest.mark.parametrize(
    ("split", "named"),
    [("test[3:3]", "there are 6 rows"), ("test[9:]", "there are 6 rows"), ("train", None),
     ("test[", None),
     ("test[a:b]", None)],
)  # fmt: skip
def test_a_split_that_gives_nothing_is_refused(sources, split, named):
    for form, source in sources.items():
        if split == "train" and form != "folder":
            continue  # a single file is whatever split it is called
        with pytest.raises(UserError) as error:
            ids(source, split)
        line = str(error.value)
        assert "\n" not in line and split in line
        assert named is None or named in line


def test_only_bad_rows_is_an_empty_split(tmp_path):
    items = [row | {"test": ""} for row in rows(2)]
    section = DatasetConfig(name=jsonl(tmp_path, items), on_bad_row="skip")
    with pytest.raises(UserError, match="no usable row"):
        load_tasks(section, "test", CODE)


def test_what_is_not_there_is_named(tmp_path):
    for name in ("/nowhere/tasks.jsonl", "builtin:nothing", str(tmp_path / "nowhere")):
        with pytest.raises(UserError) as error:
            ids(name, "test")
        assert name in str(error.value) and "\n" not in str(error.value)
    (tmp_path / "broken.jsonl").write_text("{not json\n")
    with pytest.raises(UserError, match="broken"):
        ids(str(tmp_path / "broken.jsonl"), "test")


def test_suffixes_of_files(tmp_path):
    file = jsonl(tmp_path, rows(2), "TASKS.JSONL")
    assert ids(file, "test") == ["T/0", "T/1"]
    other = jsonl(tmp_path, rows(2), "tasks.csv")
    with pytest.raises(UserError, match=r"tasks\.csv'; use a \.jsonl"):
        ids(other, "test")


def test_a_changed_file_is_read_anew(tmp_path):
    file = jsonl(tmp_path, rows(2))
    assert len(ids(file, "test")) == 2
    jsonl(tmp_path, rows(5))
    assert len(ids(file, "test")) == 5
    shutil.copy(jsonl(tmp_path, rows(3), "other.jsonl"), file)
    assert len(ids(file, "test")) == 3


def test_split_size():
    assert split_size("test[33:163]") == 130
    assert split_size("test[:32]") == 32
    assert split_size("test[5:3]") == 0
    for unknown in ("test", "test[16:]", "test[-3:]", "test[:10%]", "a[:1]+b[:1]"):
        assert split_size(unknown) is None


@pytest.mark.parametrize("form", ["jsonl", "json"])
def test_lone_surrogates_of_rows_are_replaced(form, tmp_path):
    """In a prompt, a name and a column nobody reads: no tokenizer or file takes them."""
    (row,) = rows(1)
    row |= {"task_id": "a\ud800", "prompt": row["prompt"].replace("Adds", "Adds \udfff\U0001f600")}
    row["more"] = {"\ud800": ["\udc00"]}
    file = tmp_path / f"rows.{form}"
    file.write_text(json.dumps([row] if form == "json" else row))
    (task,) = load_tasks(DatasetConfig(name=str(file)), "test", CODE)
    assert task.task_id == "a?" and "Adds ?\U0001f600" in task.fields["prompt"]
    assert task.fields["more"] == {"?": ["?"]}
