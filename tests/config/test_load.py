"""Recipes: numbers are numbers; wrong keys and values are refused in one line that names them."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rein.config.load import dump, load, resolved
from rein.config.recipe import Recipe
from rein.config.rules import kl_coefs
from rein.errors import ConfigError

ARTICLE_LINE = (
    "data.train_batch_size=256 actor.optim.lr=1e-6 actor.ppo_mini_batch_size=64 "
    "algorithm.kl_ctrl.kl_coef=0.001 algorithm.clip_ratio=0.2 reward_manager.clip_range=[-2,2]"
)


def read(text: str, folder: Path, *words: str) -> Recipe:
    file = folder / "r.yaml"
    file.write_text(text, encoding="utf-8")
    return load(file, words)[0]


def refusal(text: str, folder: Path, *words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(text, folder, *words)
    message = str(caught.value)
    assert "\n" not in message
    assert caught.value.exit_code == 2
    return message


# numbers (B52)


@pytest.mark.parametrize("text", ["1e-6", "1.0e-6", "1E-06", "0.000001", "+1e-6", "1.e-6"])
def test_every_spelling_of_a_rate_is_the_same_number(text: str, tmp_path: Path) -> None:
    in_yaml = read(f"actor:\n  optim:\n    lr: {text}\n", tmp_path)
    in_words = load(None, [f"actor.optim.lr={text}"])[0]
    assert in_yaml.actor.optim.lr == in_words.actor.optim.lr == 1e-6


def test_a_rate_in_json_is_a_number(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    file.write_text(json.dumps({"actor": {"optim": {"lr": 1e-6}}}))
    assert load(file)[0].actor.optim.lr == 1e-6


def test_underscores_and_leading_zeros_are_decimal(tmp_path: Path) -> None:
    recipe = read("data: {train_batch_size: 1_000}\nseed: 010\n", tmp_path)
    assert (recipe.data.train_batch_size, recipe.seed) == (1000, 10)


@pytest.mark.parametrize(
    "value", ["1,0", "yes", "null", "true", "[1]", "abc", "'1e-6'", "1e-6x", ".nan", ".inf", "0"]
)
@pytest.mark.parametrize("place", ["file", "words"])
def test_what_is_no_rate_is_refused_with_key_and_value(value: str, place: str, tmp_path: Path) -> None:
    if place == "file":
        message = refusal(f"actor:\n  optim:\n    lr: {value}\n", tmp_path)
        assert f"{tmp_path}/r.yaml line 3: actor.optim.lr=" in message
    else:
        message = refusal("", tmp_path, f"actor.optim.lr={value}")
        assert message.startswith("command line: actor.optim.lr=")
    assert value.strip("'[]") in message
    assert "must be" in message


@pytest.mark.parametrize(
    ("word", "wanted"),
    [
        ("actor.use_kl_loss=yes", "true or false"),
        ("actor.use_kl_loss=1", "true or false"),
        ("actor.use_kl_loss=null", "true or false"),
        ("data.train_batch_size=1.5", "a whole number"),
        ("data.train_batch_size=true", "a whole number"),
        ("data.train_batch_size=null", "a whole number"),
        ("data.train_batch_size=0", "above 0"),
        ("algorithm.gamma=1.5", "at most 1"),
        ("actor.clip_ratio_c=1", "above 1"),
        ("actor.kl_loss_coef=-0.1", "at least 0"),
        ("reward_manager.clip_range=3", "a list"),
        ("reward_manager.clip_range=[2,-2]", "lower end"),
        ("reward_manager.clip_range=[1]", "too short"),
        ("data.train_files=3", "a list"),
        ("out=[a]", "text"),
        ("score.reward=[]", "at least 1"),
        ("guards.probe_every=4", "at least 8"),
        ("algorithm.kl_ctrl.schedule=[]", "points must begin at progress 0 and rise"),
        ("algorithm.kl_ctrl.schedule=[[0.1,0.05]]", "points must begin at progress 0"),
        ("algorithm.kl_ctrl.schedule=[[0,0.05],[0.5,0.04],[0.5,0.03]]", "and rise"),
        ("algorithm.kl_ctrl.schedule=[[0,0.05],[1.5,0.04]]", "at most 1"),
        ("algorithm.kl_ctrl.schedule=[[0,-0.05]]", "at least 0"),
        ("algorithm.kl_ctrl.schedule=[[0]]", "too short"),
        ("algorithm.kl_ctrl.schedule=0.05", "a list"),
        ("sft.share=1.5", "at most 1"),
        ("reward_manager.normalize=batch", "must be one of dataset, null"),
        ("reward_manager.placement=first", "last, uniform, exponential, null"),
        ("reward_manager.placement_decay=0", "above 0"),
        ("reward_manager.missing_eos_penalty=-1", "at least 0"),
        ("reward_manager.missing_eos_penalty=1e300", "at most 1e+30"),
        (f"reward_manager.length_penalty_free={10**30}", "at most 2147483647"),
        (f"data.max_response_length={10**30}", "at most 2147483647"),
        (f"trainer.save_freq=-{10**30}", "at least -1"),
        ("actor.clip_ratio=1e300", "at most 1e+30"),
        ("actor.ppo_epochs=2147483647", "at most 10000"),
        ("threads=99999999999999", "at most 4096"),
        ('algorithm.rollout_correction.rollout_is_threshold="inf"', "must be positive and finite"),
        ("stages=[]", "at least 1"),
    ],
)
def test_wrong_types_name_key_and_what_is_wanted(word: str, wanted: str, tmp_path: Path) -> None:
    message = refusal("", tmp_path, word)
    assert word.partition("=")[0] in message
    assert wanted in message


def test_a_number_given_as_a_name_is_that_text() -> None:
    assert load(None, ["out=2026"])[0].out == "2026"
    assert load(None, ["model.path=2026"])[0].model.path == "2026"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("n" * 300, "is longer than a file system takes (255 bytes a name"),
        ("ü" * 130, "is longer than a file system takes"),
        ("a/" * 3000, "is longer than a file system takes"),
        ('"a\\0b"', "holds a zero byte"),
        ('""', "is empty"),
        ("~no-such-user/x", "there is no home folder ~no-such-user"),
        ('"\\ud800"', "surrogates not allowed"),
    ],
)
@pytest.mark.parametrize("key", ["out", "resume", "model.path", "critic.model.path", "data.train_files"])
def test_what_no_file_can_be_called_is_refused(key: str, value: str, said: str, tmp_path: Path) -> None:
    message = refusal("", tmp_path, f"{key}={value}")
    assert message.startswith(f"command line: {key}=")
    assert said in message
    assert "; " in message


@given(st.floats(min_value=1e-12, max_value=1e3, allow_subnormal=False))
def test_any_float_comes_back_as_it_was_printed(rate: float) -> None:
    assert load(None, [f"actor.optim.lr={rate!r}"])[0].actor.optim.lr == rate


# keys (B53)


@pytest.mark.parametrize(
    ("key", "named"),
    [
        ("lr", "actor.optim.lr"),
        ("actor.lr", "actor.optim.lr"),
        ("critic.lr", "critic.optim.lr"),
        ("actor.learning_rate", "actor.optim.lr"),
        ("actor.learning-rate", "actor.optim.lr"),
        ("learning_rate", "actor.optim.lr"),
        ("actor.clip_ratio_hgih", "actor.clip_ratio_high"),
        ("actor.gamma", "algorithm.gamma"),
        ("trainer.kl_coef", "algorithm.kl_ctrl.kl_coef"),
        ("trainer.ppo_epochs", "actor.ppo_epochs"),
        ("init_kl_coef", "algorithm.kl_ctrl.kl_coef"),
        ("algorithm.gae_lambda", "algorithm.lam"),
        ("train_batch_size", "data.train_batch_size"),
        ("sft.clip_ratio", "actor.clip_ratio"),
        ("data.n", "rollout.n"),
        ("rollout.temprature", "rollout.temperature"),
        ("seeed", "seed"),
        ("reward_manager.normalise", "reward_manager.normalize"),
        ("missing_eos_penalty", "reward_manager.missing_eos_penalty"),
        ("actor_rollout_ref.rollout.temprature", "rollout.temperature"),
    ],
)
def test_an_unknown_key_names_the_nearest(key: str, named: str, tmp_path: Path) -> None:
    assert f"{key} is unknown; did you mean {named}?" in refusal(f"{key}: 1\n", tmp_path)
    assert f"{key} is unknown; did you mean {named}?" in refusal("", tmp_path, f"{key}=1")


def test_an_unknown_key_is_named_with_its_line(tmp_path: Path) -> None:
    message = refusal("seed: 1\nactor:\n  # a comment\n  lr: 1\n", tmp_path)
    assert message.startswith(f"{tmp_path}/r.yaml line 4: actor.lr")


def test_far_off_keys_list_what_there_is(tmp_path: Path) -> None:
    assert "guards has preset, rules, probe_every, max_skips" in refusal("guards: {wxyz: 1}", tmp_path)
    assert "the sections are" in refusal("wxyz: 1", tmp_path)


@pytest.mark.parametrize(("word", "said"), [("model=/tmp/m", "model.path"), ("actor=5", "is a section")])
def test_a_value_for_a_section_is_refused(word: str, said: str, tmp_path: Path) -> None:
    assert said in refusal("", tmp_path, word)


def test_keys_below_a_value_are_refused(tmp_path: Path) -> None:
    assert "is one value" in refusal("", tmp_path, "actor.clip_ratio.low=1")


def test_a_section_left_empty_is_fine(tmp_path: Path) -> None:
    assert read("actor:\nseed: 3\n", tmp_path).seed == 3


@pytest.mark.parametrize(
    "text",
    [
        "seed: 1\nseed: 2\n",
        "actor: {clip_ratio: .1}\nactor.clip_ratio: .2\n",
        "score:\n  reward: {name: exact, options: {marker: a, marker: b}}\n",
    ],
)
def test_a_key_given_twice_in_a_file_is_refused(text: str, tmp_path: Path) -> None:
    assert "given twice" in refusal(text, tmp_path)


def test_two_spellings_in_one_source_are_refused_with_both_names(tmp_path: Path) -> None:
    both = "actor:\n  clip_ratio: .1\nalgorithm:\n  clip_ratio: .2\n"
    for message in (
        refusal(both, tmp_path),
        refusal("", tmp_path, "actor.clip_ratio=.1", "algorithm.clip_ratio=.2"),
    ):
        assert "actor.clip_ratio" in message
        assert "algorithm.clip_ratio" in message
    assert "line 4" in refusal(both, tmp_path)
    assert "line 2" in refusal(both, tmp_path)


def test_the_command_line_overrides_the_file_in_any_spelling(tmp_path: Path) -> None:
    assert read("actor: {clip_ratio: .1}", tmp_path, "algorithm.clip_ratio=.3").actor.clip_ratio == 0.3
    assert read("algorithm: {clip_ratio: .1}", tmp_path, "actor.clip_ratio=.3").actor.clip_ratio == 0.3


# files


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [", "is not YAML"),
        ("\tseed: 1", "is not YAML"),
        ("- a\n", "no `key: value` lines"),
        ("just text", "no `key: value` lines"),
        ("a: 1\n---\nb: 2\n", "is not YAML"),
        ("? [a]\n: 1\n", "not a plain word"),
        ("seed: !!python/object/apply:os.getpid []\n", "not a plain value"),
        ("a: &a\n  b: *a\n", "not a plain word"),
        ("stages: &x [*x]\n", "line 1: stages: is nested too deeply"),
        ("score: {reward: &x {name: math, options: {a: *x}}}\n", "score.reward: is nested too deeply"),
        (f"stages: {'[' * 200}{']' * 200}\n", "line 1: stages: is nested too deeply"),
        ("[" * 4000, "is not YAML (nested too deeply)"),
        ("seed: !!bool maybe\n", "line 1: seed: is not a plain value ('maybe')"),
        ("seed: !!timestamp soon\n", "line 1: seed: is not a plain value"),
        ('seed: "\\ud800"\n', "line 1: seed: is not a plain value"),
        ('score: {reward: {name: math, options: {"\\ud800": 1}}}\n', "score.reward: is not a plain value"),
    ],
)
def test_a_broken_file_is_refused_with_its_name(text: str, said: str, tmp_path: Path) -> None:
    message = refusal(text, tmp_path)
    assert said in message
    assert message.startswith(f"{tmp_path}/r.yaml")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such recipe file"):
        load(tmp_path / "nothere.yaml")
    with pytest.raises(ConfigError, match="did you mean the packaged recipe demo"):
        load("dmo")
    with pytest.raises(ConfigError, match="is a folder"):
        load(tmp_path)
    with pytest.raises(ConfigError, match="nnn: no such recipe file"):
        load("n" * 300)


@pytest.mark.parametrize("name", ["demo", "demo.yaml"])
def test_a_packaged_recipe_is_found_by_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "train" in load(name)[0].stages


@pytest.mark.parametrize(
    "file", sorted((Path(__file__).parents[2] / "rein" / "recipes").glob("*.yaml")), ids=str
)
def test_every_packaged_recipe_loads(file: Path) -> None:
    load(file)


def test_the_articles_line_runs_as_printed() -> None:
    recipe, notes = load(None, ARTICLE_LINE.split())
    assert recipe.data.train_batch_size == 256
    assert recipe.actor.optim.lr == 1e-6
    assert recipe.actor.ppo_mini_batch_size == 64
    assert recipe.actor.clip_ratio == 0.2
    assert recipe.reward_manager.clip_range == (-2.0, 2.0)
    assert kl_coefs(recipe)[:2] == (0.0, 0.001)
    assert notes == ["algorithm.clip_ratio is read as actor.clip_ratio"]


@pytest.mark.parametrize("word", ["seed", "=3", "", "seed:3"])
def test_words_without_key_and_value_are_refused(word: str, tmp_path: Path) -> None:
    assert "is not key=value" in refusal("", tmp_path, word)


def test_the_resolved_recipe_is_json_with_canonical_names_and_reads_back(tmp_path: Path) -> None:
    recipe, _ = load(
        None,
        [
            *ARTICLE_LINE.split(),
            "score.reward=[{name: a.b:c, options: {k: [1, null]}}, math]",
            "stages=train",
        ],
    )
    dump(recipe, tmp_path / "recipe.json")
    body = json.loads((tmp_path / "recipe.json").read_text())
    assert body == json.loads(json.dumps(resolved(recipe)))
    assert body["actor"]["clip_ratio"] == 0.2
    assert load(tmp_path / "recipe.json") == (recipe, [])
    assert [p.name for p in tmp_path.iterdir()] == ["recipe.json"]


# rules between keys


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("actor.ppo_mini_batch_size=2000", "larger than data.train_batch_size 1024"),
        ("actor.use_dynamic_bsz=false", "give actor.ppo_micro_batch_size"),
        ("actor.kl_loss_type=k1", "does not restrain on stored data"),
        ("actor.kl_loss_type=kl", "does not restrain on stored data"),
        ("algorithm.use_kl_in_reward=true", "counts the KL twice"),
        ("algorithm.use_kl_in_reward=true actor.use_kl_loss=false algorithm.kl_penalty=k3", "write k1"),
        (
            "algorithm.use_kl_in_reward=true actor.use_kl_loss=false algorithm.kl_penalty=full",
            "so that token is not held back; write k1",
        ),
        ("algorithm.kl_ctrl.type=schedule", "kl_ctrl.schedule: is missing; give points such as [[0, 0.08]"),
        ("algorithm.kl_ctrl.schedule=[[0,0.05]]", "is not read by algorithm.kl_ctrl.type fixed"),
        ("algorithm.kl_ctrl.shape=smooth algorithm.kl_ctrl.type=adaptive", "write type schedule"),
        (
            "algorithm.kl_ctrl.type=schedule algorithm.kl_ctrl.schedule=[[0,0.05]] actor.kl_loss_coef=0.1",
            "actor.kl_loss_coef: algorithm.kl_ctrl.schedule gives the coefficient",
        ),
        (
            "algorithm.kl_ctrl.type=schedule algorithm.kl_ctrl.schedule=[[0,0.05]] "
            "algorithm.kl_ctrl.kl_coef=0.1",
            "remove one of them",
        ),
        ("sft.share=0.05", "sft.files: is missing; sft.share takes demonstrations from there"),
        (
            "sft.share=0.05 sft.files=a.parquet actor.loss_agg_mode=seq-mean-token-mean",
            "seq-mean-token-mean has no token count to share with demonstrations; write token-mean",
        ),
        ("sft.coef=0.5", "is not read without sft.share"),
        ("reward_manager.overlong_buffer.enable=true", "overlong_buffer.len: is missing; give the tokens"),
        (
            "reward_manager.overlong_buffer.enable=true reward_manager.overlong_buffer.len=4096",
            "overlong_buffer.len: 4096 is more than data.max_response_length 2048",
        ),
        ("reward_manager.placement=exponential", "placement_decay: goes with"),
        (
            "reward_manager.placement=last reward_manager.placement_decay=0.9",
            "placement=exponential; give both",
        ),
        (
            "critic.model.share_trunk=true",
            "share_trunk: needs adapters: the actor trains the whole trunk; write model.lora_rank=16",
        ),
        (
            "critic.model.share_trunk=true model.lora_rank=4 critic.model.path=rewards/model",
            "critic.model.path: has weights of its own, but critic.model.share_trunk takes the actor's",
        ),
        ("stages=[train,sft]", "put sft first"),
        ("stages=[train,train]", "listed twice"),
    ],
)
def test_rules_between_keys_hold(words: str, said: str, tmp_path: Path) -> None:
    assert said in refusal("", tmp_path, *words.split())


@pytest.mark.parametrize(
    "words",
    [
        "actor.kl_loss_type=k1+",
        "actor.kl_loss_type=abs",
        "actor.kl_loss_type=k1 algorithm.insist=true",
        "actor.kl_loss_type=k1 actor.use_kl_loss=false",
        "algorithm.use_kl_in_reward=true algorithm.insist=true",
        "algorithm.use_kl_in_reward=true actor.use_kl_loss=false algorithm.kl_penalty=kl",
        "actor.kl_loss_type=full",
        "algorithm.use_kl_in_reward=true actor.use_kl_loss=false algorithm.kl_penalty=full "
        "algorithm.insist=true",
    ],
)
def test_what_restrains_or_is_insisted_on_passes(words: str) -> None:
    load(None, words.split())


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("actor.kl_loss_type=k4", "must be one of kl, k1"),
        ("actor.kl_loss_type=fulll", "did you mean full"),
        ("algorithm.method=filtered_bx", "did you mean filtered_bc"),
        ("algorithm.adv_estimator=gdpo", "not built yet"),
        ("actor.policy_loss.loss_mode=kl_cov", "not built yet"),
        ("algorithm.kl_ctrl.type=moving_avrage", "did you mean moving_average"),
        ("algorithm.rollout_correction.rollout_is=tokens", "did you mean token"),
        ("algorithm.rollout_correction.preset=decoupled_token", "did you mean decoupled_token_is"),
        ("actor.loss_agg_mode=tokenmean", "did you mean token-mean"),
        ("trainer.logger=[console,clearml]", "clearml is not built yet"),
        ("trainer.logger=[console,foo]", "must be one of console, jsonl, tensorboard"),
        ("trainer.logger=[console,wanbd]", "did you mean wandb"),
        ("nproc=0", "nproc"),
        ("stages=[trian]", "did you mean train"),
    ],
)
def test_unknown_names_are_refused_before_anything_loads(word: str, said: str, tmp_path: Path) -> None:
    assert said in refusal("", tmp_path, word)


@pytest.mark.parametrize(
    ("words", "coefs", "said"),
    [
        ("", (0, 0.05), "KL loss 0.05 (default)"),
        ("algorithm.kl_ctrl.kl_coef=0.001", (0, 0.001), "KL loss 0.001 (algorithm.kl_ctrl.kl_coef)"),
        ("algorithm.kl_ctrl.kl_coef=0.001 actor.kl_loss_coef=0.02", (0, 0.02), "kl_coef 0.001 is not used"),
        ("actor.use_kl_loss=false", (0, 0), "no KL"),
        (
            "actor.use_kl_loss=false algorithm.use_kl_in_reward=true",
            (0.001, 0),
            "KL in reward 0.001 (default)",
        ),
        (
            "algorithm.insist=true algorithm.use_kl_in_reward=true algorithm.kl_ctrl.kl_coef=0.3",
            (0.3, 0.3),
            "KL in reward 0.3 (algorithm.kl_ctrl.kl_coef); KL loss 0.3 (algorithm.kl_ctrl.kl_coef), "
            "off_policy (k3_soft",
        ),
        (
            "algorithm.kl_ctrl.type=schedule algorithm.kl_ctrl.schedule=[[0,0.08],[0.2,0.05]]",
            (0, 0.08),
            "KL loss 0.08 (algorithm.kl_ctrl.schedule, at the start)",
        ),
    ],
)
def test_kl_coef_is_of_the_kl_that_is_on(words: str, coefs: tuple[float, float], said: str) -> None:
    found = kl_coefs(load(None, words.split())[0])
    assert found[:2] == coefs
    assert said in found.note
