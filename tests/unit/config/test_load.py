"""Reading a run's YAML, overriding it, printing it."""

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_distill.config import (
    ObjectiveConfig,
    RunConfig,
    TermConfig,
    load_capture_config,
    load_config,
    to_yaml,
)
from megatron_distill.errors import ConfigError
from tests.support.sample_configs import ARCHITECTURE, MINIMAL


@pytest.fixture
def write(tmp_path):
    """Write a tree, or text as it stands, to a file and return its path."""

    def write_file(content):
        path = tmp_path / "run.yaml"
        text = content if isinstance(content, str) else yaml.safe_dump(content)
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


@pytest.fixture
def minimal(write):
    return write(MINIMAL)


def test_defaults_fill_keys_missing_in_the_file(minimal):
    config = load_config(minimal)
    assert config.output == "runs/default"
    assert config.train.micro_batch_size == 1
    assert config.optimizer.learning_rate == 3e-4
    assert config.teacher is None
    assert config.data.sources[0].weight == 1.0
    assert config.student.architecture.kv_heads == 2
    assert config.student.architecture.head_width == 16


def test_a_config_cannot_be_changed(minimal):
    config = load_config(minimal)
    with pytest.raises(ValueError, match="frozen"):
        config.train.steps = 7


def test_terms_follow_the_teacher_when_they_are_left_out(write):
    teacher = {"teacher": {"architecture": ARCHITECTURE}}
    objective = {"objective": {"chunk_tokens": 32}}
    assert load_config(write(MINIMAL | objective)).objective == ObjectiveConfig(
        terms=(), chunk_tokens=32
    )
    taught = load_config(write(MINIMAL | teacher | objective)).objective
    assert taught == ObjectiveConfig(terms=(TermConfig(),), chunk_tokens=32)
    assert taught.terms[0].divergence == "forward_kl"
    assert taught.terms[0].weight == 1.0


def test_terms_follow_the_teacher_for_a_config_built_in_python():
    tree = MINIMAL | {"objective": ObjectiveConfig(ce_weight=2.0)}
    assert RunConfig.model_validate(tree).objective == ObjectiveConfig(ce_weight=2.0, terms=())
    kept = MINIMAL | {"objective": ObjectiveConfig(terms=(TermConfig(weight=3.0),))}
    assert RunConfig.model_validate(kept).objective.terms[0].weight == 3.0


def test_one_path_is_a_list_of_one(write):
    data = MINIMAL["data"] | {"sources": [{"format": "text", "paths": "corpus/*.txt"}]}
    assert load_config(write(MINIMAL | {"data": data})).data.sources[0].paths == ("corpus/*.txt",)


def test_numbers_in_scientific_notation_are_numbers(write):
    text = yaml.safe_dump(MINIMAL) + "optimizer: {learning_rate: 1e-3, epsilon: 1E-9}\n"
    optimizer = load_config(write(text)).optimizer
    assert (optimizer.learning_rate, optimizer.epsilon) == (1e-3, 1e-9)


def test_interpolation_reaches_other_keys(write):
    text = yaml.safe_dump(MINIMAL) + "output: runs/seed-${seed}\nseed: 7\n"
    assert load_config(write(text)).output == "runs/seed-7"
    assert load_config(write(text), ["seed=8"]).output == "runs/seed-8"


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("parallel.tensor=2", lambda c: c.parallel.tensor, 2),
        ("output=runs/a=b", lambda c: c.output, "runs/a=b"),
        ("data.sources.0.weight=2", lambda c: c.data.sources[0].weight, 2.0),
        ("optimizer.learning_rate=1e-4", lambda c: c.optimizer.learning_rate, 1e-4),
        ("parallel.sequence=false", lambda c: c.parallel.sequence, False),
        ("student.architecture.num_kv_heads=null", lambda c: c.student.architecture.kv_heads, 4),
        ("logging.wandb={project: p, mode: online}", lambda c: c.logging.wandb.mode, "online"),
        (
            "data.sources=[{format: text, paths: [a, b]}]",
            lambda c: c.data.sources[0].paths,
            ("a", "b"),
        ),
        ("teacher.checkpoint=runs/t", lambda c: c.teacher.checkpoint, "runs/t"),
        ("teacher.checkpoint=runs/t", lambda c: len(c.objective.terms), 1),
    ],
)
def test_an_override_replaces_the_files_value(minimal, override, read, value):
    found = read(load_config(minimal, [override]))
    assert found == value
    assert type(found) is type(value)


def test_a_mapping_is_merged_and_the_last_override_wins(minimal):
    config = load_config(minimal, ["train={steps: 9}", "seed=1", "seed=2"])
    assert (config.train.steps, config.train.global_batch_size, config.seed) == (9, 4, 2)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("parallel.tensor", "key=value"),
        ("parallel..tensor=2", "key=value"),
        ("parallel.tensor =2", "key=value"),
        ("train={steps: ", "not valid YAML"),
        ("train={steps:9}", "train.steps:9: unknown key; .* a space after the colon, steps: 9"),
        ("data.sources=[{paths:[a]}]", "a space after each colon"),
        ("data.sources.1.weight=2", "data.sources is a list of 1 entry, counted from 0; to add"),
        ("data.sources.first.weight=2", r"write the whole list, data.sources=\[...\]"),
        ("objective.terms.0.weight=2", r"objective.terms is not a list .* objective.terms=\[...\]"),
        ("seed=${sed}", "sed"),
    ],
)
def test_a_malformed_override_is_named(minimal, override, words):
    with pytest.raises(ConfigError, match=words) as caught:
        load_config(minimal, [override])
    assert override in str(caught.value)


def test_only_overrides_that_have_to_do_with_the_error_are_repeated(minimal):
    with pytest.raises(ConfigError) as caught:
        load_config(minimal, ["seed=3", "train.global_batch_size=-1"])
    assert str(caught.value).startswith(f"{minimal} with train.global_batch_size=-1: 1 problem")


def test_a_value_that_replaces_a_section_is_refused(minimal):
    with pytest.raises(ConfigError, match="train = 5: must be a section"):
        load_config(minimal, ["train=5"])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "contains nothing"),
        ("tiny\n", "contains a single value"),
        ("train: {steps: 3\n", "not valid YAML.*line 2"),
        ("train: 1\ntrain: 2\n", "not valid YAML.*train"),
        ("train: !!python/object/apply:os.getcwd []\n", "not valid YAML"),
        ("output: ${nowhere}\n", "nowhere"),
        ("output: ???\n", "output"),
    ],
)
def test_a_file_that_is_not_a_configuration_is_named(write, content, words):
    path = write(content)
    with pytest.raises(ConfigError, match=words) as caught:
        load_config(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_a_folder_and_foreign_bytes_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.yaml: cannot be read"):
        load_config(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"output: caf\xe9\n")
    with pytest.raises(ConfigError, match=r"latin\.yaml: not UTF-8 text \(byte 11\)"):
        load_config(tmp_path / "latin.yaml")


def test_a_path_may_be_text(minimal):
    assert load_config(str(minimal)) == load_config(minimal)


WORDS = st.text(st.characters(codec="ascii", exclude_characters="$\\\0"), min_size=1, max_size=12)
FLOATS = st.floats(min_value=1e-12, max_value=1e12, allow_nan=False)


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    output=WORDS,
    text_key=WORDS,
    weight=FLOATS,
    temperature=FLOATS,
    threads=st.none() | st.integers(1, 64),
    fraction=st.floats(0.0, 0.99),
)
def test_printing_and_reading_back_gives_the_same(
    tmp_path, output, text_key, weight, temperature, threads, fraction
):
    source = {"format": "jsonl", "paths": [output, "1e-3", "null"], "text_key": text_key}
    tree = MINIMAL | {
        "output": output,
        "teacher": {"checkpoint": text_key},
        "objective": {"terms": [{"weight": weight, "temperature": temperature}]},
        "runtime": {"threads": threads},
        "data": MINIMAL["data"]
        | {"sources": [source | {"weight": weight}], "validation_fraction": fraction},
    }
    config = RunConfig.model_validate(tree)
    path = tmp_path / "printed.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    assert load_config(path) == config


def test_a_printed_config_without_a_teacher_shows_it_and_loads_back(minimal, write):
    config = load_config(minimal)
    printed = to_yaml(config)
    assert "teacher: null" in printed
    assert "terms: []" in printed
    assert load_config(write(printed)) == config


def test_the_file_of_another_job_is_called_so(write):
    with pytest.raises(ConfigError, match="the file of a run and of no capture"):
        load_capture_config(write(MINIMAL))
    capture = {key: value for key, value in MINIMAL.items() if key in ("data", "parallel")}
    store = {"path": "stores/a", "samples": 8}
    with pytest.raises(ConfigError, match="the file of a capture and of no run"):
        load_config(write({**capture, "store": store}))
