"""Tests of the DSA checkpoint: a small one of the same construction, run by a plain torch model and by transformers."""

import json
import pathlib
import sys
from collections.abc import Iterator

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
safetensors_torch = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "scripts"))

import itertools

import make_tiny_dsa
from serving.client import random_prompts
from serving.reference_dsa import Disturbance, Generation, ReferenceModel
from serving.retrieval_plan import Codebook, inverse_frequencies, make_plan

SMALL = make_tiny_dsa.FULL_CONFIG | {
    "hidden_size": 384, "index_head_dim": 80, "index_n_heads": 16, "index_topk": 192, "intermediate_size": 128,
    "moe_intermediate_size": 64, "kv_lora_rank": 128, "num_attention_heads": 16, "num_key_value_heads": 16,
    "num_hidden_layers": 4, "first_k_dense_replace": 4, "q_lora_rank": 384, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "vocab_size": 256,
}  # fmt: skip
PROMPT_TOKENS, OUTPUT_TOKENS, NUM_PROMPTS = 640, 100, 3


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices here are too small for more threads; gradients are not needed."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A small checkpoint on disk."""
    folder = tmp_path_factory.mktemp("tiny-dsa")
    make_tiny_dsa.write_checkpoint(folder, SMALL, seed=5)
    return folder


def _load(folder: pathlib.Path) -> dict[str, "torch.Tensor"]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= safetensors_torch.load_file(file)
    return tensors


@pytest.fixture(scope="module")
def runs(checkpoint: pathlib.Path) -> list[dict[str, Generation]]:
    """For each prompt: the text as it is, with disturbed rounding and row order, and with 1 % of the rows zeroed."""
    model = ReferenceModel(SMALL, _load(checkpoint), PROMPT_TOKENS + OUTPUT_TOKENS)
    results = []
    for prompt in random_prompts(3, [PROMPT_TOKENS] * NUM_PROMPTS, SMALL["vocab_size"]):
        logits = model.prefill(prompt)
        disturbances = {
            "exact": Disturbance(),
            "rounded": Disturbance(shuffle=True, noise=2**-8),
            "zeroed": Disturbance(zero_rows=0.01),
        }
        results.append(
            {name: model.decode(logits, PROMPT_TOKENS, OUTPUT_TOKENS, d) for name, d in disturbances.items()}
        )
    return results


def test_greedy_text_varies(runs: list[dict[str, Generation]]) -> None:
    """Goal: texts are neither loops nor alike. Method: distinct tokens of 100 out of 256, and between prompts."""
    assert all(len(set(run["exact"].tokens)) >= 50 for run in runs)
    assert len({tuple(run["exact"].tokens[:20]) for run in runs}) == NUM_PROMPTS


def test_rounding_and_row_order_do_not_change_the_text(runs: list[dict[str, Generation]]) -> None:
    """Goal: only wrong rows change a text. Method: shuffled rows and a bf16 step of noise on each attention output."""
    assert all(run["rounded"].tokens == run["exact"].tokens for run in runs)
    assert min(min(run["exact"].margins) for run in runs) > 2**-6


def test_zeroing_one_percent_of_rows_changes_the_text(runs: list[dict[str, Generation]]) -> None:
    """Goal: a wrong row shows. Method: 1 % of the selected rows zeroed at random in every layer and step."""
    changed = sum(run["zeroed"].tokens != run["exact"].tokens for run in runs)
    assert 2 * changed > NUM_PROMPTS


def test_selection_moves_but_keeps_its_locality(runs: list[dict[str, Generation]]) -> None:
    """Goal: misses occur, at a believable rate. Method: share of a step's selected rows that the next step selects."""
    for run in runs:
        steps = run["exact"].selected
        kept = [
            len(a & b) / len(a)
            for old, new in itertools.pairwise(steps)
            for a, b in zip(old, new, strict=True)
        ]
        assert 0.5 < np.mean(kept) < 0.95
        assert len(set().union(*(step[0] for step in steps))) > 2 * SMALL["index_topk"]


def test_every_layer_matters(checkpoint: pathlib.Path) -> None:
    """Goal: stale rows show in whichever layer they lie. Method: one layer's old rows shifted by a token, in turn."""
    model = ReferenceModel(SMALL, _load(checkpoint), PROMPT_TOKENS + 40)
    (prompt,) = random_prompts(9, [PROMPT_TOKENS], SMALL["vocab_size"])
    logits = model.prefill(prompt)
    expected = model.decode(logits, PROMPT_TOKENS, 40).tokens
    for layer in range(SMALL["num_hidden_layers"]):
        kept = model.rows[layer].clone()
        model.rows[layer, 64:512] = kept[63:511]
        assert model.decode(logits, PROMPT_TOKENS, 40).tokens != expected, f"layer {layer}"
        model.rows[layer] = kept
    assert model.decode(logits, PROMPT_TOKENS, 40).tokens == expected


def test_transformers_gives_the_same_text(checkpoint: pathlib.Path, runs: list[dict[str, Generation]]) -> None:
    """Goal: names, shapes and meaning are DeepSeek-V3.2's. Method: transformers' own model loads and decodes it."""
    transformers = pytest.importorskip("transformers", minversion="5.0", reason="transformers 5 is not installed")
    model, info = transformers.DeepseekV32ForCausalLM.from_pretrained(
        checkpoint, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(info.values()), info
    (prompt, *_) = random_prompts(3, [PROMPT_TOKENS] * NUM_PROMPTS, SMALL["vocab_size"])
    tokens = model.generate(
        torch.tensor([prompt]), max_new_tokens=32, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert tokens[0, PROMPT_TOKENS:].tolist() == runs[0]["exact"].tokens[:32]


def test_rotary_frequencies_are_those_of_sglang() -> None:
    """Goal: pointers aim at the right lag on a server. Method: SGLang's YaRN helpers on the full config."""
    yarn = pytest.importorskip("sglang.srt.layers.rotary_embedding.yarn", reason="sglang is not installed")
    config = make_tiny_dsa.FULL_CONFIG
    scaling, dim, base = config["rope_scaling"], config["qk_rope_head_dim"], config["rope_theta"]
    low, high = yarn.yarn_find_correction_range(
        scaling["beta_fast"], scaling["beta_slow"], dim, base, scaling["original_max_position_embeddings"]
    )
    keep = 1 - yarn.yarn_linear_ramp_mask(low, high, dim // 2, dtype=torch.float32)
    plain = 1 / base ** (torch.arange(0, dim, 2).float() / dim)
    expected = plain * keep + plain / scaling["factor"] * (1 - keep)
    torch.testing.assert_close(torch.from_numpy(inverse_frequencies(config)).float(), expected)


def test_codewords_are_orthogonal_with_equal_means() -> None:
    """Goal: all matches score alike and nothing else matches. Method: Gram matrix of one token per class."""
    plan = make_plan(make_tiny_dsa.FULL_CONFIG)
    book = Codebook(plan, seed=1)
    major, minor = book.classes(2)
    assert np.bincount(major * 8 + minor).tolist() == [32] * 1024
    words = np.stack([book.codes(2)[major == kind][0, : plan.code] for kind in range(plan.num_major_classes)])
    gram = words @ words.T
    opposite = np.roll(np.eye(128), 64, axis=0)
    assert np.array_equal(gram, 64 * (np.eye(128) - opposite))
    assert set(np.abs(words.mean(axis=1))) == {0.125}
    assert len(np.unique(book.bits(), axis=0)) == 1 << plan.num_bits


def test_equal_seeds_give_equal_bytes(checkpoint: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Goal: servers on two machines load the same model. Method: write again, and once with another seed."""
    make_tiny_dsa.write_checkpoint(tmp_path / "same", SMALL, seed=5)
    make_tiny_dsa.write_checkpoint(tmp_path / "other", SMALL, seed=6)
    first, same, other = _load(checkpoint), _load(tmp_path / "same"), _load(tmp_path / "other")
    assert first.keys() == same.keys() and all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(first)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in first.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 32000}, "power of two"),
        ({"num_hidden_layers": 3}, "cover the vocabulary"),
        ({"first_k_dense_replace": 1}, "dense"),
        ({"hidden_size": 128}, "hidden_size: the features need"),
        ({"index_head_dim": 128}, "index_head_dim"),
    ],
)
def test_shapes_that_cannot_hold_the_program_are_refused(
    change: dict[str, int], message: str, tmp_path: pathlib.Path
) -> None:
    """Goal: no checkpoint that silently cannot work. Method: one broken rule at a time."""
    with pytest.raises(ValueError, match=message):
        make_tiny_dsa.write_checkpoint(tmp_path, SMALL | change, seed=1)
